// The frame: who is logged in, where in the dashboard we are, and the page there.

import { render } from "./vendor/preact/preact.mjs"
import { useEffect, useRef, useState } from "./vendor/preact/hooks.mjs"
import { html, link, Problem } from "./parts.js"
import { currentSession, logIn, logOut } from "./session.js"
import { useViews } from "./polling.js"
import { Jobs } from "./pages/jobs.js"
import { Job } from "./pages/job.js"
import { Vertex } from "./pages/vertex.js"
import { Checkpoints } from "./pages/checkpoints.js"
import { Explained } from "./pages/explanation.js"
import { Snapshots } from "./pages/snapshots.js"
import { Snapshot, Difference } from "./pages/snapshot.js"
import { Failures } from "./pages/failures.js"
import { Care } from "./pages/care.js"
import { Members, Tokens, Audit } from "./pages/service.js"

// Path pattern -> [title, page]; `:name` is a segment, decoded. Ids become part of the paths that a page asks for, whoever made the
// link: one that is no id has no page, as it could be the way to another route.
const IDS = { job: /^[0-9a-f]{32}$/, vertex: /^[0-9a-f]{32}$/, checkpoint: /^[0-9]{1,19}$/ }
const ROUTES = [
  ["", "Jobs", Jobs],
  ["jobs/:job", "Overview", Job],
  ["jobs/:job/vertices/:vertex", "Operator", Vertex],
  ["jobs/:job/checkpoints", "Checkpoints", Checkpoints],
  ["jobs/:job/checkpoints/:checkpoint", "Checkpoint", Explained],
  ["jobs/:job/snapshots", "Snapshots", Snapshots],
  ["jobs/:job/snapshots/:path", "Snapshot", Snapshot],
  ["jobs/:job/snapshots/:path/diff/:other", "Difference", Difference],
  ["jobs/:job/failures", "Failures", Failures],
  ["jobs/:job/care", "Drills and cost", Care],
  ["members", "Members", Members],
  ["tokens", "Tokens", Tokens],
  ["audit", "Audit log", Audit],
]

function where() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2)
  const segments = path.split("/").filter(Boolean)
  for (const [pattern, title, Page] of ROUTES) {
    const wanted = pattern.split("/").filter(Boolean)
    if (wanted.length !== segments.length || !wanted.every((part, at) => part[0] === ":" || part === segments[at])) continue
    try {
      const values = Object.fromEntries(wanted.flatMap((part, at) => part[0] === ":" ? [[part.slice(1), decodeURIComponent(segments[at])]] : []))
      if (Object.entries(values).some(([name, value]) => IDS[name] && !IDS[name].test(value))) break
      return { title, Page, values, query: new URLSearchParams(query), path }
    } catch { break /* an escape that is none */ }
  }
  return { title: "No such page", Page: Lost, values: {}, query: new URLSearchParams(), path }
}

const Lost = () => html`<h1 tabindex="-1">No such page</h1><p><a href="#/">All jobs</a></p>`

const TABS = [["", "Overview"], ["checkpoints", "Checkpoints"], ["snapshots", "Snapshots"], ["failures", "Failures"], ["care", "Drills and cost"]]

function Frame({ session, onLogOut }) {
  const [place, setPlace] = useState(where)
  const main = useRef(null)
  const isFirst = useRef(true)
  useEffect(() => {
    const moved = () => setPlace(where())
    addEventListener("hashchange", moved)
    return () => removeEventListener("hashchange", moved)
  }, [])
  const jobId = place.values.job
  const job = useViews(jobId ? [`v1/jobs/${jobId}/config`] : null, 1, 0) // of no list, which a token for one job is refused
  const name = job.data?.[0].name || jobId
  useEffect(() => { document.title = `${place.title}${jobId ? ` · ${name}` : ""} · Holdfast` }, [place, name])
  useEffect(() => {
    if (!isFirst.current) { main.current.querySelector("h1")?.focus({ preventScroll: true }); scrollTo(0, 0) }
    isFirst.current = false
  }, [place.path])
  const tab = jobId ? place.path.split("/")[2] || "" : null
  const skip = event => { event.preventDefault(); main.current.querySelector("h1")?.focus() }
  return html`
    <a class="skip" href="#/" onClick=${skip}>Skip to content</a>
    <header class="top">
      <a class="brand" href="#/"><img src="icon.svg" alt="" width="24" height="24" /> Holdfast</a>
      <nav aria-label="Service"><a href="#/" aria-current=${place.path === "" ? "page" : null}>Jobs</a>
        ${["members", "tokens", "audit"].map(each => html`<a href=${link(each)} aria-current=${place.path === each ? "page" : null}>${each[0].toUpperCase() + each.slice(1)}</a>`)}</nav>
      <span class="who">${(session.name || "token").replace(/^session of /, "")} · ${session.role} <button type="button" onClick=${onLogOut}>Log out</button></span>
    </header>
    ${jobId ? html`<nav class="tabs" aria-label=${`Job ${name}`}><span class="jobname">${name}</span>
      ${TABS.map(([part, label]) => html`<a href=${link(...["jobs", jobId, part].filter(Boolean))} aria-current=${tab === part || (part === "" && tab === "vertices") ? "page" : null}>${label}</a>`)}</nav>` : null}
    <main ref=${main} key=${place.path}>
      ${jobId && job.error?.status === 404 ? html`<h1 tabindex="-1">No such job</h1><p>${job.error.message}</p><p><a href="#/">All jobs</a></p>`
        : html`<${place.Page} ...${place.values} query=${place.query} name=${name} session=${session} />`}
    </main>`
}

function LogIn({ onLogIn }) {
  const [token, setToken] = useState("")
  const [state, setState] = useState({ busy: false, error: null })
  const submit = async event => {
    event.preventDefault()
    setState({ busy: true, error: null })
    try {
      await logIn(token.trim())
      await onLogIn()
    } catch (error) {
      setState({ busy: false, error })
    }
  }
  useEffect(() => { document.title = "Log in · Holdfast" }, [])
  return html`<main class="login"><form onSubmit=${submit}>
    <h1><img src="icon.svg" alt="" width="40" height="40" /> Holdfast</h1>
    <p>Checkpoints and exactly-once for streaming jobs. Log in with a token of this service: <code>holdfast token create</code> makes one.</p>
    <input type="text" name="username" autocomplete="username" value="token" readonly hidden />
    <label>Token<input type="password" name="token" autocomplete="current-password" required value=${token} onInput=${event => setToken(event.target.value)} /></label>
    <${Problem} error=${state.error} />
    <p class="buttons"><button type="submit" class="main" disabled=${state.busy}>Log in</button></p>
  </form></main>`
}

function App() {
  const [session, setSession] = useState(undefined)
  const [error, setError] = useState(null)
  const look = async () => {
    try {
      setSession(await currentSession())
      setError(null)
    } catch (problem) {
      setError(problem)
      setTimeout(look, 3_000)
    }
  }
  useEffect(() => {
    look()
    const ended = () => setSession(found => found ? null : found) // the login is over: revoked, or expired
    addEventListener("holdfast:logged-out", ended)
    return () => removeEventListener("holdfast:logged-out", ended)
  }, [])
  if (session === undefined) return error ? html`<main class="login"><h1>Holdfast</h1><${Problem} error=${error} /><p>Asked again every three seconds.</p></main>` : null
  if (session === null) return html`<${LogIn} onLogIn=${look} />`
  return html`<${Frame} session=${session} onLogOut=${async () => { await logOut().catch(() => {}); await look() }} />`
}

render(html`<${App} />`, document.getElementById("app"))
