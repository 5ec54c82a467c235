// What keeps snapshots fit for use: labels that keep them, drills that restore them for a trial, and what they cost.

import { html, Card, Facts, Fresh, link, may, Shown, Status, Table } from "../parts.js"
import { bytes, count, duration, moment, plural } from "../format.js"
import { usePoll } from "../polling.js"
import { ApiError, get, send } from "../session.js"
import { Action } from "../dialog.js"

const kindOf = kind => kind.replaceAll("_", " ")

const TRIES = 5

// The newest checkpoint may be replaced by a newer one before its label arrives: then that one is meant.
async function give(job, path, checkpoint) {
  for (let left = checkpoint ? 1 : TRIES; ; left -= 1) {
    const id = checkpoint ? Number(checkpoint) : (await get(`v1/jobs/${job}/checkpoints`)).data.latest.completed?.id
    if (id === undefined) throw new ApiError(404, ["no checkpoint is completed yet"], "NotFoundError")
    try {
      return await send("PUT", path, { checkpoint: id })
    } catch (error) {
      if (left === 1 || ![404, 409].includes(error.status)) throw error
    }
  }
}

export function Labels({ job, session }) {
  const poll = usePoll(`v1/jobs/${job}/labels`, 10_000)
  const path = label => `v1/jobs/${job}/labels/${encodeURIComponent(label)}`
  return html`<${Card} title="Labels" aside=${html`<span class="quiet">A labelled snapshot is kept until its label is removed.</span>`}>
    <${Shown} poll=${poll}>${({ labels, damage }) => html`
      <${Table} caption="Labels" rows=${labels} rowKey=${each => `${each.label} ${each.checkpoint_id}`} empty="None." columns=${[
        ["Label", each => each.label],
        ["Snapshot", each => html`<a href=${link("jobs", job, "snapshots", each.location)}>${kindOf(each.kind)} ${each.checkpoint_id}</a>`],
        ["Given", each => moment(each.created_ms), "time"],
        ["", each => may(session, "operator") ? html`<${Action} label="Remove" kind="danger" title=${`Remove the label ${each.label}?`} typed=${each.label} act=${async () => { await send("DELETE", `${path(each.label)}?checkpoint=${each.checkpoint_id}`); poll.refresh() }}>
          <p>Its snapshot is deleted when its time has come, if no other label keeps it.</p><//>` : null],
      ]} />
      ${damage.length ? html`<ul>${damage.map(each => html`<li>${typeof each === "string" ? each : JSON.stringify(each)}</li>`)}</ul>` : null}
      ${may(session, "operator") ? html`<p class="buttons"><${Action} label="Label a snapshot" title="Label a snapshot" fields=${[
        { name: "label", label: "Label", value: "" }, { name: "checkpoint", label: "Id of the checkpoint or savepoint", value: "", help: "Empty: the newest one." },
      ]} act=${async values => { await give(job, path(values.label.trim()), values.checkpoint.trim()); poll.refresh() }}><//></p>` : null}`}<//><//>`
}

export function Care({ job, session }) {
  const drills = usePoll(`v1/jobs/${job}/drills`, 5_000)
  const cost = usePoll(`v1/jobs/${job}/cost`, 30_000)
  return html`<div class="title"><h1 tabindex="-1">Drills and cost</h1><${Fresh} poll=${drills} /></div>
    <${Card} title="Drills" aside=${html`<span class="quiet">A drill restores a snapshot in a process of its own, reads every row and compares the counts.</span>`}>
      <${Shown} poll=${drills}>${found => html`<${Drills} job=${job} found=${found.drills} />
        ${may(session, "operator") ? html`<p class="buttons"><${Action} label="Drill now" title="Restore a snapshot for a trial?" fields=${[{ name: "checkpoint", label: "Id of the checkpoint or savepoint", value: "", help: "Empty: the newest one." }]}
          act=${async values => { await send("POST", `v1/jobs/${job}/drills`, values.checkpoint ? { checkpoint: Number(values.checkpoint) } : {}); drills.refresh() }} done=${() => html`<p>It runs; its outcome will be in the table.</p>`}>
          <p>The job goes on, and is not touched.</p><//></p>` : null}`}<//><//>
    <${Card} title="What its snapshots cost"><${Shown} poll=${cost}>${found => html`<${Cost} job=${job} found=${found} />`}<//><//>`
}

const DRILL = { passed: "sound", failed: "damaged", running: "IN_PROGRESS", error: "missing" }

function Drills({ job, found }) {
  return html`<${Table} caption="Drills" rows=${found} rowKey=${each => each.drill_id} empty="None yet: no snapshot of this job was restored for a trial." columns=${[
    ["Snapshot", each => html`<a href=${link("jobs", job, "snapshots", each.location)}>${each.checkpoint_id}</a>`],
    ["Outcome", each => html`<${Status} of=${DRILL[each.state] || each.state} />${each.state === "error" ? html` <small>could not be told: ${each.error}</small>` : null}`],
    ["Began", each => moment(each.started_ms), "time"],
    ["Took", each => duration(each.duration_ms), "number"],
    ["Rows", each => count(each.rows), "number"],
    ["States", each => count(each.states), "number"],
    ["Size", each => bytes(each.size), "number"],
    ["By", each => each.by],
    ["Problems", each => each.problem_count > 0 ? html`<details><summary>${plural(each.problem_count, "problem")}</summary><ul>${each.problems.map(problem => html`<li>${typeof problem === "string" ? problem : JSON.stringify(problem)}</li>`)}</ul></details>` : "–"],
  ]} />`
}

function Cost({ job, found }) {
  const { money, requests } = found
  const price = value => value < 0 ? "–" : `${value.toFixed(2)} ${money.currency}`
  return html`<${Facts} of=${[
      ["In all", bytes(found.total_size)], ["Of one checkpoint alone", bytes(found.exclusive_size)], ["Shared by checkpoints", bytes(found.shared_size)], ["Savepoints", bytes(found.savepoint_size)],
      ["Everything else", bytes(found.other_size)], ["Files", count(found.files)], ["Small ones among them", count(found.small_files)],
      requests && ["Writes an hour", count(requests.puts_per_hour)], requests && ["Reads an hour", count(requests.gets_per_hour)], requests && ["Lists an hour", count(requests.lists_per_hour)], requests && ["Deletions an hour", count(requests.deletes_per_hour)],
      money && ["A month", html`<b>${price(money.total_per_month)}</b>`], money && ["of that storage", price(money.storage_per_month)], money && ["and requests", price(money.requests_per_month)],
    ]} />
    ${requests ? null : html`<p class="quiet">No requests for further checkpoints: the job has ended, has no interval, or has completed none yet.</p>`}
    ${money ? html`<p class="quiet">By the prices of ${money.prices}.</p>` : html`<p class="quiet">No money without prices: <code>holdfast serve --prices FILE</code>.</p>`}
    <${Table} caption="Checkpoints and their files" rows=${found.checkpoints} rowKey=${each => each.checkpoint_id} empty="No checkpoint is kept." columns=${[
      ["Checkpoint", each => html`<a href=${link("jobs", job, "checkpoints", each.checkpoint_id)}>${kindOf(each.kind)} ${each.checkpoint_id}</a>`],
      ["Labels", each => each.labels.join(", ") || "–"],
      ["Its own bytes", each => bytes(each.exclusive_size), "number"],
      ["Shared bytes", each => bytes(each.shared_size), "number"],
      ["Files", each => count(each.files), "number"],
      ["Small files", each => count(each.small_files), "number"],
    ]} />`
}
