// What pages share. All text goes through htm into text nodes: a name is never markup.

import { h } from "./vendor/preact/preact.mjs"
import { useState } from "./vendor/preact/hooks.mjs"
import htm from "./vendor/htm/htm.mjs"
import { clock, duration } from "./format.js"
import { age, STALE_MS, useTick } from "./polling.js"

export const html = htm.bind(h)

export const link = (...segments) => "#/" + segments.map(encodeURIComponent).join("/")

// Whether a caller may do something. What is shown is a courtesy: the service judges each request.
const RANKS = { viewer: 0, operator: 1, admin: 2 }
export const may = (session, role) => (RANKS[session.role] ?? -1) >= RANKS[role]

const TONES = {
  ok: "good", RUNNING: "good", COMPLETED: "good", FINISHED: "good", active: "good", completed: "good", fits: "good", sound: "good",
  at_risk: "warn", RESTARTING: "warn", FAILING: "warn", CANCELLING: "warn", RECONCILING: "warn", CREATED: "warn", SUSPENDED: "warn",
  INITIALIZING: "warn", DEPLOYING: "warn", SCHEDULED: "warn", CANCELING: "warn", pending: "warn", incomplete: "warn", missing: "warn", low: "warn",
  bad: "bad", FAILED: "bad", failed: "bad", refused: "bad", damaged: "bad", high: "bad",
}
const WORDS = { at_risk: "at risk", IN_PROGRESS: "in progress", ok: "ok", bad: "bad" }
const MARKS = { good: "●", warn: "▲", bad: "■", none: "○" }

// A state in words, with a mark of its own shape: colour alone says nothing to some.
export function Status({ of }) {
  const tone = TONES[of] || "none"
  return html`<span class=${`status ${tone}`}><span aria-hidden="true">${MARKS[tone]}</span> ${WORDS[of] || String(of).toLowerCase().replaceAll("_", " ")}</span>`
}

// Until when the figures are known to hold; loud once they are old, or nobody answers.
export function Fresh({ poll }) {
  useTick()
  if (!poll.receivedMs) return null
  const old = age(poll)
  const when = poll.asOfMs ? clock(poll.asOfMs) : `${duration(old)} ago`
  if (poll.error || old > STALE_MS) {
    return html`<p class="fresh stale" role="status"><span aria-hidden="true">▲</span> stale: these figures are as of ${when}, ${duration(old)} old${poll.error ? `: ${poll.error.message}` : ""}</p>`
  }
  return html`<p class="fresh">as of ${when}</p>`
}

// What a poll has, once it has it; else that it waits, or why not. `missing`: what a 404 means.
export function Shown({ poll, missing, children }) {
  if (poll.data !== null) return children(poll.data)
  if (!poll.error) return html`<p class="quiet" aria-live="polite">Loading …</p>`
  if (poll.error.status === 404 && missing) return html`<p class="quiet">${missing}</p>`
  if (poll.error.status === 403) return html`<p class="quiet">Your token may not see this: ${poll.error.message}</p>`
  return html`<${Problem} error=${poll.error} />`
}

export function Problem({ error }) {
  return error ? html`<p class="problem" role="alert"><span aria-hidden="true">■</span> ${error.message}${error.kind ? html` <small>${error.kind}</small>` : null}</p>` : null
}

// columns: [title, row => cell, class?]. Tables scroll by themselves on a narrow screen, also by keyboard.
export function Table({ caption, columns, rows, empty = "none", rowKey }) {
  if (!rows.length) return html`<p class="quiet">${empty}</p>`
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption class="unseen">${caption}</caption>
      <thead><tr>${columns.map(([title, , kind]) => html`<th scope="col" class=${kind || ""}>${title}</th>`)}</tr></thead>
      <tbody>${rows.map((row, index) => html`<tr key=${rowKey ? rowKey(row) : index}>
        ${columns.map(([, cell, kind], at) => at === 0
          ? html`<th scope="row" class=${kind || ""}>${cell(row)}</th>`
          : html`<td class=${kind || ""}>${cell(row)}</td>`)}</tr>`)}</tbody>
    </table></div>`
}

export function Card({ title, children, aside, level = 2, kind = "" }) {
  return html`<section class=${`card ${kind}`}><header><${`h${level}`}>${title}</${`h${level}`}>${aside || null}</header>${children}</section>`
}

export function Facts({ of }) {
  return html`<dl class="facts">${of.filter(Boolean).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`
}

// A bar of shares with a text beside it that says the same.
export function Shares({ parts, label }) {
  const total = parts.reduce((sum, [, value]) => sum + (value > 0 ? value : 0), 0)
  return html`<svg class="shares" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label=${label}>
    <rect class="track" width="100" height="8" />
    ${total > 0 ? parts.reduce(([drawn, x], [kind, value]) => {
      const width = Math.max(0, value) / total * 100
      return [[...drawn, html`<rect class=${kind} x=${x} width=${width} height="8" />`], x + width]
    }, [[], 0])[0] : null}</svg>`
}

export function Copyable({ text }) {
  const [done, setDone] = useState(false)
  const copy = async () => { await navigator.clipboard.writeText(text); setDone(true); setTimeout(() => setDone(false), 2_000) }
  return html`<div class="command"><code>${text}</code>${navigator.clipboard ? html`<button type="button" onClick=${copy}>${done ? "copied" : "copy"}</button>` : null}</div>`
}
