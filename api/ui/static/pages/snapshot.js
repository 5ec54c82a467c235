// One snapshot: operators, states, rows; whether it is sound, whether the job could start from it, and what another has different.

import { useState } from "../vendor/preact/hooks.mjs"
import { html, Card, Facts, link, may, Problem, Shown, Status, Table } from "../parts.js"
import { bytes, count, moment, plural } from "../format.js"
import { usePoll } from "../polling.js"
import { get, operate, send } from "../session.js"
import { Action } from "../dialog.js"
import { known, useKnown } from "./snapshots.js"

const asked = (path, parameters) => `${path}?${new URLSearchParams(parameters)}`

export function Snapshot({ job, path, session, name }) {
  const poll = usePoll(asked("v1/snapshots", { path }), 0)
  const others = useKnown(job, 0)
  return html`<div class="title"><h1 tabindex="-1">Snapshot</h1></div><p><code>${path}</code></p>
    <${Shown} poll=${poll} missing=${poll.error?.message}>${found => html`
      <${Card} title=${`${found.kind.replaceAll("_", " ")} ${found.checkpoint_id} of ${found.job_name}`}>
        <${Facts} of=${[["Cut at", moment(found.trigger_timestamp)], ["Complete at", moment(found.completion_timestamp)], ["Size", bytes(found.size)], ["Format", `version ${found.version}`], ["Attempt", count(found.attempt)],
          found.external.length && ["Files outside of it", count(found.external.length)], found.in_flight && ["Records in flight", count(found.in_flight.reduce((sum, each) => sum + each.rows, 0))]]} />
        <p class="buttons"><${Check} label="Verify every file" act=${() => send("POST", "v1/snapshots/verify", { path })}>${report => html`<${Verified} report=${report} />`}<//>
          ${may(session, "operator") ? html`<${Check} label=${`Could ${name} start from it?`} act=${async () => (await get(asked(`v1/jobs/${job}/preflight`, { restore: path }))).data}>${report => html`<${Preflight} report=${report} />`}<//>` : null}
          ${found.kind.includes("savepoint") && may(session, "admin") ? html`<${Dispose} path=${found.location} job=${job} />` : null}</p>
        <${Compare} job=${job} path=${path} others=${others} /><//>
      ${found.operators.map(operator => html`<${Operator} key=${operator.uid} path=${path} operator=${operator} session=${session} />`)}`}<//>`
}

// A question that is asked by a button, with the answer below it.
function Check({ label, act, children }) {
  const [state, setState] = useState({ busy: false, error: null, result: null })
  const ask = async () => {
    setState({ busy: true, error: null, result: null })
    try { setState({ busy: false, error: null, result: await act() }) } catch (error) { setState({ busy: false, error, result: null }) }
  }
  return html`<span class="check-of"><button type="button" disabled=${state.busy} onClick=${ask}>${state.busy ? "Working …" : label}</button><span role="status"><${Problem} error=${state.error} />${state.result ? children(state.result) : null}</span></span>`
}

const Verified = ({ report }) => html`<div class="answer"><p><${Status} of=${report.sound ? "sound" : "damaged"} /> ${plural(report.files, "file")}, ${bytes(report.size)} read${report.unchecked_count ? `; ${count(report.unchecked_count)} outside could not be looked at` : ""}.</p>
  ${report.problems.length ? html`<ul>${report.problems.slice(0, 50).map(each => html`<li><b>${each.kind}</b> ${each.path}: ${each.detail}</li>`)}</ul>` : null}</div>`

const Preflight = ({ report }) => html`<div class="answer"><p><${Status} of=${report.refusals?.length ? "refused" : "fits"} /> ${report.refusals?.length ? "The job as it runs now would be refused:" : "The job as it runs now can start from it."}</p>
  ${report.refusals?.length ? html`<ol>${report.refusals.map(each => html`<li><b>${each.kind}</b>: ${each.message}</li>`)}</ol>` : null}
  ${report.notes?.length ? html`<ul>${report.notes.map(note => html`<li>${note}</li>`)}</ul>` : null}</div>`

function Dispose({ path, job }) {
  const folder = path.replace(/\/+$/, "").split("/").at(-1)
  return html`<${Action} label="Dispose of it" kind="danger" title="Dispose of this savepoint?" typed=${folder}
    act=${() => operate("v1/savepoint-disposal", { "savepoint-path": path }, "v1/savepoint-disposal")} done=${() => html`<p>It is deleted. <a href=${link("jobs", job, "snapshots")}>Snapshots</a></p>`}>
    <p>Its files are deleted for good. A savepoint that a job needs is refused.</p><//>`
}

function Compare({ job, path, others }) {
  const [other, setOther] = useState("")
  const found = others.data ? known(others.data[0], others.data[1].records).filter(each => each.path !== path) : []
  if (!found.length) return null
  const open = event => { event.preventDefault(); location.hash = link("jobs", job, "snapshots", path, "diff", other || found[0].path) }
  return html`<form class="row" onSubmit=${open}><label>Compare with<select value=${other || found[0].path} onChange=${event => setOther(event.target.value)}>
    ${found.map(each => html`<option value=${each.path}>${each.what} ${each.id ?? ""} · ${moment(each.atMs)}</option>`)}</select></label><button type="submit">Compare</button></form>`
}

function Operator({ path, operator, session }) {
  return html`<${Card} title=${operator.name || operator.uid} aside=${html`<span class="quiet">uid ${operator.uid}, parallelism ${operator.parallelism}, ${bytes(operator.size)}</span>`}>
    <${Table} caption=${`States of ${operator.uid}`} rows=${operator.states} rowKey=${each => each.name} empty="It keeps no state." columns=${[
      ["State", each => each.name], ["Kind", each => each.kind.replaceAll("_", " ")], ["Key", each => each.key_type || "–"], ["Value", each => each.value_type],
      ["Format", each => each.format], ["Size", each => bytes(each.size), "number"], ["Entries", each => count(each.entries), "number"],
    ]} />
    ${may(session, "operator") ? operator.states.map(state => html`<${Rows} key=${state.name} path=${path} uid=${operator.uid} state=${state.name} />`) : html`<p class="quiet">Rows are for operators.</p>`}<//>`
}

const PAGE_ROWS = 50

function Rows({ path, uid, state }) {
  const [pages, setPages] = useState([""])
  const [open, setOpen] = useState(false)
  const poll = usePoll(open ? asked("v1/snapshots/rows", { path, uid, state, limit: PAGE_ROWS, after: pages.at(-1) }) : null, 0)
  return html`<details onToggle=${event => setOpen(event.currentTarget.open)}><summary>Rows of ${state}</summary>
    ${open ? html`<${Shown} poll=${poll}>${page => html`<${Table} caption=${`Rows of ${state}`} rows=${page.rows} empty=${page.next ? "No row in this part; there may be some in the next." : "It has no row."}
        columns=${page.columns.map((column, at) => [column, row => html`<code>${row[at]}</code>`])} />
      <p class="buttons"><button type="button" disabled=${pages.length === 1} onClick=${() => setPages(pages.slice(0, -1))}>Previous</button>
        <button type="button" disabled=${!page.next} onClick=${() => setPages([...pages, page.next])}>Next ${PAGE_ROWS}</button>
        <span class="quiet">page ${pages.length}${page.clipped ? `; ${plural(page.clipped, "value")} cut at 1,000 characters` : ""}</span></p>`}<//>` : null}</details>`
}

export function Difference({ job, path, other, session }) {
  const poll = usePoll(may(session, "operator") ? asked("v1/snapshots/diff", { path, other, keys: 20 }) : null, 0)
  const place = each => html`<a href=${link("jobs", job, "snapshots", each)}><code>${each}</code></a>`
  if (!may(session, "operator")) return html`<h1 tabindex="-1">Difference</h1><p class="quiet">Rows are for operators.</p>`
  return html`<div class="title"><h1 tabindex="-1">Difference</h1></div>
    <p>From ${place(path)}<br />to ${place(other)}</p>
    <${Shown} poll=${poll}>${found => html`<${Card} title=${found.same ? "They hold the same" : "What changed"}>
      ${found.operators_added.length ? html`<p>Operators that only the second has: ${found.operators_added.join(", ")}</p>` : null}
      ${found.operators_removed.length ? html`<p>Operators that only the first has: ${found.operators_removed.join(", ")}</p>` : null}
      <${Table} caption="Differences by state" rows=${found.states} empty="Neither has state." columns=${[
        ["Operator", each => each.operator], ["State", each => each.state], ["Added", each => count(each.added), "number"], ["Removed", each => count(each.removed), "number"], ["Changed", each => count(each.changed), "number"], ["Same", each => count(each.same), "number"],
      ]} /><//>
      ${found.states.filter(each => each.keys.length).map(each => html`<${Card} title=${`${each.operator} · ${each.state}`} aside=${html`<span class="quiet">${plural(each.keys.length, "difference")}${each.keys.length < each.added + each.removed + each.changed ? ", the first ones" : ""}</span>`}>
        <${Table} caption=${`Differences of ${each.state}`} rows=${each.keys} columns=${[
          ["Key", key => html`<code>${key.key}</code>`], ["Change", key => key.change], ["Entry", key => html`<code>${key.entry === "null" ? "" : key.entry}</code>`], ["Before", key => html`<code>${key.before === "null" ? "" : key.before}</code>`], ["After", key => html`<code>${key.after === "null" ? "" : key.after}</code>`],
        ]} /><//>`)}`}<//>`
}
