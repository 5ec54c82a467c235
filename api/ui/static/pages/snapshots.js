// Snapshots of a job: what it can go back to, and savepoints that were taken; take one, or stop with one.

import { useState } from "../vendor/preact/hooks.mjs"
import { html, Card, Fresh, link, may, Shown, Table } from "../parts.js"
import { bytes, duration, moment } from "../format.js"
import { usePoll } from "../polling.js"
import { operate } from "../session.js"
import { Action } from "../dialog.js"
import { Labels } from "./care.js"
import { Forget } from "./forget.js"

// Known snapshots, newest first: {path, what, id, atMs, size}.
export function known(stats, requests) {
  const found = new Map()
  const add = entry => { if (entry.path && !found.has(entry.path)) found.set(entry.path, entry) }
  const completed = [stats.latest.savepoint, stats.latest.completed, ...stats.history].filter(each => each && each.status === "COMPLETED" && !each.discarded)
  for (const each of completed) add({ path: each.external_path, what: each.is_savepoint ? "savepoint" : "checkpoint", id: each.id, atMs: each.trigger_timestamp, size: each.state_size })
  for (const { at_ms: atMs, facts } of requests) add({ path: facts.location, what: "savepoint", id: facts.checkpoint_id, atMs, size: -1 })
  return [...found.values()].sort((a, b) => b.atMs - a.atMs)
}

export const useKnown = (job, everyMs) => usePoll([`v1/jobs/${job}/checkpoints`, `v1/jobs/${job}/history?kinds=request&newest=true&limit=100`], everyMs)

export function Snapshots({ job, name, session }) {
  const poll = useKnown(job, 3_000)
  const [path, setPath] = useState("")
  const open = event => { event.preventDefault(); location.hash = link("jobs", job, "snapshots", path.trim()) }
  const done = result => html`<p>${result.location ? html`Taken: <a href=${link("jobs", job, "snapshots", result.location)}>${result.location}</a>` : "Done."}</p>`
  const target = { name: "target", label: "Directory", value: "", help: "Empty: the job's own savepoint directory." }
  return html`<div class="title"><h1 tabindex="-1">Snapshots</h1><${Fresh} poll=${poll} /></div>
    ${may(session, "operator") ? html`<p class="buttons">
      <${Action} label="Take a savepoint" title=${`Take a savepoint of ${name}?`} fields=${[target]} done=${done}
        act=${async values => { const found = await operate(`v1/jobs/${job}/savepoints`, values.target ? { "target-directory": values.target } : {}, `v1/jobs/${job}/savepoints`); poll.refresh(); return found }}>
        <p>The job goes on meanwhile. A savepoint is kept until somebody disposes of it.</p><//>
      <${Action} label="Stop with a savepoint" kind="danger" title=${`Stop ${name}?`} typed=${name} done=${done}
        fields=${[target, { name: "drain", label: "Drain: fire all windows and timers first. The job is not meant to be resumed then.", value: false, kind: "checkbox" }]}
        act=${values => operate(`v1/jobs/${job}/stop`, { drain: Boolean(values.drain), ...(values.target ? { targetDirectory: values.target } : {}) }, `v1/jobs/${job}/savepoints`)}>
        <p>It ends behind a savepoint from which it can be started again: no record is lost, and none counted twice.</p><//></p>` : null}
    <${Shown} poll=${poll}>${([stats, history]) => html`<${Card} title="What this job can go back to">
      <${Table} caption="Snapshots" rows=${known(stats, history.records)} rowKey=${each => each.path} empty="None yet." columns=${[
        ["Snapshot", each => html`<a href=${link("jobs", job, "snapshots", each.path)}>${each.what} ${each.id ?? ""}</a>`],
        ["Taken", each => moment(each.atMs), "time"],
        ["Age", each => duration(Date.now() - each.atMs), "number"],
        ["State size", each => bytes(each.size), "number"],
        ["Place", each => html`<code>${each.path}</code>`],
      ]} />
      <form class="row" onSubmit=${open}><label>Any other, by its path<input required value=${path} onInput=${event => setPath(event.target.value)} spellcheck="false" /></label><button type="submit">Open</button></form><//>`}<//>
    <${Labels} job=${job} session=${session} />
    ${may(session, "admin") ? html`<${Forget} job=${job} name=${name} />` : null}`
}
