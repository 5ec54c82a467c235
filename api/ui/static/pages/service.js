// The service itself: its members, who may use it, and who did what.

import { useState } from "../vendor/preact/hooks.mjs"
import { html, Card, Copyable, Fresh, link, may, Problem, Shown, Status, Table } from "../parts.js"
import { count, duration, moment } from "../format.js"
import { usePoll } from "../polling.js"
import { get, send } from "../session.js"
import { Action } from "../dialog.js"

export function Members() {
  const poll = usePoll("v1/members")
  const workers = usePoll("v1/taskmanagers", 5_000)
  return html`<div class="title"><h1 tabindex="-1">Members</h1><${Fresh} poll=${poll} /></div>
    <${Card} title="Coordinators"><${Shown} poll=${poll}>${({ members }) => html`<${Table} caption="Coordinators" rows=${members} rowKey=${each => each.id} empty="One coordinator, by itself: it runs without --ha." columns=${[
      ["Member", each => html`${each.host} <small>pid ${each.pid}${each.this ? ", answers this page" : ""}</small>`],
      ["Role", each => html`<${Status} of=${each.role} />${each.leaving ? " leaving" : ""}`],
      ["Address", each => each.url],
      ["Epoch", each => each.epoch ? count(each.epoch) : "–", "number"],
      ["Last sign of life", each => each.seen_ms_ago === null ? "not known" : `${duration(each.seen_ms_ago)} ago`, "number"],
      ["Lock", each => each.holds_lock ? "held" : each.lock_problem || (each.holds_lock === null ? "not known" : "–")],
    ]} />`}<//><//>
    <${Card} title="Workers"><${Shown} poll=${workers}>${({ taskmanagers }) => html`<${Table} caption="Workers" rows=${taskmanagers.slice(0, 500)} rowKey=${each => each.id} empty="No worker is registered." columns=${[
      ["Worker", each => each.id],
      ["Address", each => each.path],
      ["Slots", each => count(each.slotsNumber), "number"],
      ["Last heartbeat", each => moment(each.timeSinceLastHeartbeat), "time"],
    ]} />`}<//><//>`
}

const LIFE = { "1 day": 86_400_000, "7 days": 604_800_000, "30 days": 2_592_000_000, "until it is revoked": null }

export function Tokens({ session }) {
  const poll = usePoll("v1/tokens", 10_000)
  const jobs = usePoll("v1/jobs/overview", 0)
  const names = Object.fromEntries((jobs.data?.jobs || []).map(each => [each.jid, each.name]))
  return html`<div class="title"><h1 tabindex="-1">Tokens</h1><${Fresh} poll=${poll} /></div>
    <${Shown} poll=${poll}>${({ tokens }) => html`
      <${Card} title="Who may use this service">
        <${Table} caption="Tokens" rows=${tokens} rowKey=${each => each.id} empty="None is issued. The service's own token is that of an administrator." columns=${[
          ["Name", each => each.name || html`<span class="quiet">${each.id}</span>`],
          ["Role", each => each.role],
          ["Job", each => each.job ? html`<a href=${link("jobs", each.job)}>${names[each.job] || each.job}</a>` : "all"],
          ["Issued", each => moment(each.created), "time"],
          ["Ends", each => each.expires < 0 ? "when it is revoked" : html`${moment(each.expires)}${each.expires < Date.now() ? html` <${Status} of="bad" />` : null}`],
          ["", each => may(session, "admin") ? html`<${Action} label="Revoke" kind="danger" title=${`Revoke ${each.name || each.id}?`} typed=${each.name || each.id} act=${async () => { await send("DELETE", `v1/tokens/${each.id}`); poll.refresh() }}>
            <p>Whoever uses it is refused at once here, and within five seconds everywhere.</p><//>` : null],
        ]} /><//>
      ${may(session, "admin") ? html`<${Issue} refresh=${poll.refresh} />` : null}`}<//>`
}

function Issue({ refresh }) {
  const [values, setValues] = useState({ name: "", role: "viewer", job: "", life: "30 days" })
  const [made, setMade] = useState(null)
  const [error, setError] = useState(null)
  const set = name => event => setValues({ ...values, [name]: event.target.value })
  const submit = async event => {
    event.preventDefault()
    setError(null)
    try {
      setMade(await send("POST", "v1/tokens", { role: values.role, name: values.name || null, job: values.job || null, expires_in_ms: LIFE[values.life] }))
      refresh()
    } catch (problem) { setError(problem) }
  }
  return html`<${Card} title="Issue a token"><form class="row" onSubmit=${submit}>
    <label>Name<input required value=${values.name} onInput=${set("name")} autocomplete="off" /></label>
    <label>Role<select value=${values.role} onChange=${set("role")}>${["viewer", "operator", "admin"].map(role => html`<option>${role}</option>`)}</select></label>
    <label>Only for the job (name or id)<input value=${values.job} onInput=${set("job")} autocomplete="off" /></label>
    <label>Valid for<select value=${values.life} onChange=${set("life")}>${Object.keys(LIFE).map(life => html`<option>${life}</option>`)}</select></label>
    <button type="submit" class="main">Issue</button></form>
    <${Problem} error=${error} />
    ${made ? html`<div role="status"><p>Shown this once; it is stored nowhere:</p><${Copyable} text=${made.token} />
      ${made.job_exists ? null : html`<p>No job of this name or id is here yet: the token is for one that is submitted by it. If it is mistyped, revoke the token.</p>`}</div>` : null}<//>`
}

export function Audit() {
  const poll = usePoll("v1/audit?limit=100", 5_000)
  const [older, setOlder] = useState({ lines: [], next: null, error: null })
  const more = async next => {
    try {
      const { data } = await get(`v1/audit?limit=100&after=${encodeURIComponent(next)}`)
      setOlder(before => ({ lines: [...before.lines, ...data.lines], next: data.next, error: null }))
    } catch (error) { setOlder(before => ({ ...before, error })) }
  }
  return html`<div class="title"><h1 tabindex="-1">Audit log</h1><${Fresh} poll=${poll} /></div>
    <${Shown} poll=${poll}>${page => {
      const next = older.next ?? page.next
      return html`<${Card} title="Who changed what, and who was refused" aside=${html`<span class="quiet">Newest first. <code>holdfast audit verify</code> says whether it is whole.</span>`}>
        <${Table} caption="Audit log" rows=${[...page.lines, ...older.lines]} empty="Nothing is recorded yet." columns=${[
          ["When", each => moment(each.time_ms), "time"],
          ["What", each => each.kind === "request" || each.kind === "refused" ? each.request : `${each.kind}${each.count ? ` ${each.count}` : ""}`],
          ["About", each => [each.subject, each.job].filter(Boolean).join(" · ")],
          ["By", each => `${each.credential}${each.role ? ` (${each.role})` : ""}`],
          ["From", each => each.peer],
          ["Answer", each => each.status ? html`${each.kind === "refused" ? html`<${Status} of="refused" /> ` : null}${each.status}` : "–"],
        ]} />
        <${Problem} error=${older.error} />
        ${next ? html`<p class="buttons"><button type="button" onClick=${() => more(next)}>Older lines</button></p>` : null}<//>`
    }}<//>`
}
