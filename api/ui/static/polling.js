// Reads that repeat while their page is looked at, and how old what they show is.

import { useEffect, useRef, useState } from "./vendor/preact/hooks.mjs"
import { get, getTogether } from "./session.js"

const LONGEST_MS = 30_000
export const STALE_MS = 5_000

// Ask `path` every `everyMs` (0: once, and again only while the service is busy or does not answer). null: nothing to ask. `path` may
// be a list: its answers come together, as a list. `staysMissing`: what is not there will not come, and is not asked for again.
export function usePoll(path, everyMs = 2_000, staysMissing = false) {
  return useReads(path, everyMs, staysMissing, getEach)
}

// As usePoll of a list; `views` of it, from the first on, are asked for in one request, since what jobs publish answers them. One that
// is not there is no refusal for the browser then, which tells its console of those.
export function useViews(paths, views = paths?.length, everyMs = 2_000, staysMissing = false) {
  return useReads(paths, everyMs, staysMissing, async (all, signal) => (await Promise.all([getTogether(all.slice(0, views), signal), getEach(all.slice(views), signal)])).flat())
}

const getEach = (paths, signal) => Promise.all(paths.map(each => get(each, signal)))

function useReads(path, everyMs, staysMissing, read) {
  const [state, setState] = useState({ data: null, error: null, asOfMs: null, ageMs: 0, receivedMs: 0 })
  const again = useRef(() => {})
  const key = Array.isArray(path) ? path.join(" ") : path
  useEffect(() => {
    if (path === null) return undefined
    const abort = new AbortController()
    let timer = null
    let pause = everyMs
    const look = async () => {
      clearTimeout(timer)
      let mayPass = false
      let isGone = false
      try {
        const paths = Array.isArray(path) ? path : [path]
        const answers = await read(paths, abort.signal)
        const [{ asOfMs, serviceMs }] = answers
        const data = Array.isArray(path) ? answers.map(each => each.data) : answers[0].data
        pause = everyMs
        setState({ data, error: null, asOfMs: asOfMs || serviceMs, ageMs: asOfMs && serviceMs ? Math.max(0, serviceMs - asOfMs) : 0, receivedMs: performance.now() })
      } catch (error) {
        if (error.name === "AbortError") return
        mayPass = error.status === 0 || error.status === 429 || error.status === 503
        isGone = staysMissing && error.status === 404
        pause = Math.min(LONGEST_MS, Math.max(everyMs, 1_000, pause * 2, (error.retryAfterS || 0) * 1_000))
        setState(before => ({ ...before, error }))
      }
      if ((everyMs && !isGone) || mayPass) timer = setTimeout(whenVisible, pause)
    }
    const whenVisible = () => document.hidden ? document.addEventListener("visibilitychange", look, { once: true, signal: abort.signal }) : look()
    again.current = look
    setState({ data: null, error: null, asOfMs: null, ageMs: 0, receivedMs: 0 })
    look()
    return () => { abort.abort(); clearTimeout(timer) }
  }, [key, everyMs])
  return { ...state, refresh: () => again.current() }
}

// How old the figures are now: age when they came, and the time since then.
export function age(poll) {
  return poll.receivedMs ? poll.ageMs + performance.now() - poll.receivedMs : 0
}

// Render again every second.
export function useTick(everyMs = 1_000) {
  const [, tick] = useState(0)
  useEffect(() => {
    const timer = setInterval(() => tick(number => number + 1), everyMs)
    return () => clearInterval(timer)
  }, [everyMs])
}
