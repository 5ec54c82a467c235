// One checkpoint, explained: what was seen, why, and one setting; then each operator and subtask with its phases.

import { useState } from "../vendor/preact/hooks.mjs"
import { html, Card, Copyable, Facts, Fresh, link, Shares, Shown, Status, Table } from "../parts.js"
import { bytes, count, duration, moment } from "../format.js"
import { usePoll, useViews } from "../polling.js"

const PHASES = { start_delay: "Start delay", alignment: "Alignment", sync: "Synchronous part", encode: "Encoding", store: "Storage", acknowledge: "Acknowledgement", decide: "Decision", notify: "Notification" }

const placed = place => place ? `${place.vertex}${place.subtask >= 0 ? ` subtask ${place.subtask}` : ""}${place.host ? ` on ${place.host}` : ""}` : ""

export function Causes({ found }) {
  return html`<ol class="causes">${found.causes.map((cause, at) => html`<li class=${at === found.causes.length - 1 ? "first-cause" : ""}>${cause.text}${cause.place && !cause.text.includes(cause.place.vertex) ? html` <small>${placed(cause.place)}</small>` : null}</li>`)}</ol>
    ${found.setting ? html`<div class="setting"><p><b>${found.setting.name}</b>: ${String(found.setting.old)} → <b>${String(found.setting.new)}</b>. ${found.setting.why}</p>
      ${found.setting.command ? html`<${Copyable} text=${found.setting.command} />` : html`<p class="quiet">It holds from the job's next submission on.</p>`}</div>` : null}`
}

function SeenThen({ found }) {
  return found.explained_ms > 0 ? html`<p class="quiet">Explained when it ended, from what was seen ${moment(found.explained_ms)}.</p>` : null
}

function PhaseBars({ found }) {
  const longest = Math.max(1, ...found.phases.map(each => Math.max(each.longest_ms, each.median_ms)))
  const row = each => {
    const width = ms => Math.max(0, ms) / longest * 100
    const said = `${duration(each.longest_ms)}, usually ${duration(each.median_ms)}`
    return html`<svg class="shares tall" viewBox="0 0 100 12" preserveAspectRatio="none" role="img" aria-label=${said}><rect class="track" width="100" height="12" /><rect class=${each.is_unusual ? "unusual" : "busy"} width=${width(each.longest_ms)} height="12" />${each.median_ms >= 0 ? html`<rect class="median" x=${Math.min(99, width(each.median_ms))} width="1" height="12" />` : null}</svg>`
  }
  return html`<${Table} caption="Phases, the longest of each" rows=${found.phases} rowKey=${each => each.phase} empty="No phase has ended." columns=${[
    ["Phase", each => html`${PHASES[each.phase] || each.phase}${each.is_unusual ? html` <span class="status warn"><span aria-hidden="true">▲</span> unusual</span>` : null}`],
    ["Longest", each => duration(each.longest_ms), "number"],
    ["Usually", each => duration(each.median_ms), "number"],
    ["", row, "wide"],
    ["Where", each => placed(each.place)],
  ]} />`
}

// One that the coordinator shows no longer: what the history has of it does not change any more.
function Recorded({ job, checkpoint, path }) {
  const poll = usePoll(path, 0)
  return html`<${Shown} poll=${poll} missing=${html`This job shows no checkpoint ${checkpoint}, and its history has no record of one. Failures and restarts are in the <a href=${link("jobs", job, "failures")}>history</a>.`}>${explained => html`
    <p class="quiet">The coordinator no longer knows this checkpoint: it shows the newest ones. This is what the job's history has of it.</p>
    <${Card} title="Why" kind=${explained.is_usual ? "" : "attention"}><p class="why">${explained.summary}</p><${SeenThen} found=${explained} /><${Causes} found=${explained} /><//>
    <${Card} title="Phases"><${PhaseBars} found=${explained} /><//>`}<//>`
}

export function Explained({ job, checkpoint }) {
  const details = `v1/jobs/${job}/checkpoints/details/${checkpoint}`
  const poll = useViews([details, `v1/jobs/${job}/plan`, `${details}/explain`], 2, 2_000, true)
  const isMissing = poll.data === null && poll.error?.status === 404
  return html`<div class="title"><h1 tabindex="-1">Checkpoint ${checkpoint}</h1>${poll.data ? html`<${Status} of=${poll.data[0].status} />` : null}<${Fresh} poll=${poll} /></div>
    ${isMissing ? html`<${Recorded} job=${job} checkpoint=${checkpoint} path=${`${details}/explain`} />` : null}
    <${Shown} poll=${poll} missing=${" "}>${([found, { plan }, explained]) => {
      const names = Object.fromEntries(plan.nodes.map(node => [node.id, node.description || node.id]))
      return html`<${Card} title="Why" kind=${explained.is_usual ? "" : "attention"}><p class="why">${explained.summary}</p><${SeenThen} found=${explained} /><${Causes} found=${explained} /><//>
        <${Card} title="Phases" aside=${html`<span class="quiet">${explained.compared ? `beside the medians of ${explained.compared} completed ones` : "too few have completed to compare with"}</span>`}><${PhaseBars} found=${explained} /><//>
        <${Card} title="Operators"><${Table} caption="Operators" rows=${Object.entries(found.tasks)} rowKey=${([id]) => id} columns=${[
          ["Operator", ([id]) => html`<a href=${link("jobs", job, "vertices", id)}>${names[id] || id}</a>`],
          ["Acknowledged", ([, task]) => `${task.num_acknowledged_subtasks} / ${task.num_subtasks}`, "number"],
          ["Took", ([, task]) => duration(task.end_to_end_duration), "number"],
          ["Stored", ([, task]) => bytes(task.checkpointed_size), "number"],
          ["State size", ([, task]) => bytes(task.state_size), "number"],
          ["In flight, processed", ([, task]) => bytes(task.processed_data), "number"],
          ["In flight, stored", ([, task]) => bytes(task.persisted_data), "number"],
        ]} />
        ${Object.keys(found.tasks).map(id => html`<${Subtasks} key=${id} path=${`v1/jobs/${job}/checkpoints/details/${checkpoint}/subtasks/${id}`} name=${names[id] || id} />`)}<//>
        <${Card} title="Facts"><${Facts} of=${[
          ["Triggered", moment(found.trigger_timestamp)], ["Took", duration(found.end_to_end_duration)], ["Stored", bytes(found.checkpointed_size)], ["State size", bytes(found.state_size)],
          found.external_path && ["Snapshot", found.discarded ? "discarded" : html`<a href=${link("jobs", job, "snapshots", found.external_path)}>${found.external_path}</a>`],
          found.failure_message && ["Failure", found.failure_message],
        ]} /><//>`
    }}<//>`
}

const SHOWN_MAX = 200

// Asked once it is opened: of a large job this is the longest answer there is.
function Subtasks({ path, name }) {
  const [open, setOpen] = useState(false)
  const poll = usePoll(open ? path : null, 5_000)
  const phases = each => each.className === "completed" ? [["start", each.start_delay], ["align", each.alignment.duration], ["sync", each.checkpoint.sync], ["async", each.checkpoint.async]] : []
  return html`<details onToggle=${event => setOpen(event.currentTarget.open)}><summary>Subtasks of ${name}</summary>
    ${open ? html`<${Shown} poll=${poll}>${({ summary, subtasks }) => {
      const slowest = [...subtasks].sort((a, b) => (a.className === "completed") - (b.className === "completed") || b.end_to_end_duration - a.end_to_end_duration).slice(0, SHOWN_MAX)
      const spread = ({ p50, max }) => `${duration(p50)}, at most ${duration(max)}`
      return html`${summary ? html`<${Facts} of=${[
        ["Start delay, typically", spread(summary.start_delay)], ["Alignment", spread(summary.alignment.duration)], ["Synchronous part", spread(summary.checkpoint_duration.sync)],
        ["Asynchronous part", spread(summary.checkpoint_duration.async)], ["In all", spread(summary.end_to_end_duration)],
      ]} />` : null}<${Table} caption=${`Subtasks of ${name}`} rows=${slowest} rowKey=${each => each.index} columns=${[
        ["Subtask", each => each.index],
        ["State", each => html`<${Status} of=${each.className === "completed" ? "completed" : "pending"} />`],
        ["Took", each => duration(each.end_to_end_duration), "number"],
        ["Phases", each => html`<${Shares} parts=${phases(each)} label=${phases(each).map(([phase, ms]) => `${phase} ${duration(ms)}`).join(", ") || "not acknowledged"} />`, "wide"],
        ["Start delay", each => duration(each.start_delay), "number"],
        ["Alignment", each => duration(each.alignment?.duration), "number"],
        ["Sync", each => duration(each.checkpoint?.sync), "number"],
        ["Async", each => duration(each.checkpoint?.async), "number"],
        ["Stored", each => bytes(each.checkpointed_size), "number"],
        ["State size", each => bytes(each.state_size), "number"],
      ]} />${subtasks.length > SHOWN_MAX ? html`<p class="quiet">The ${SHOWN_MAX} slowest of ${count(subtasks.length)}, missing ones first.</p>` : null}`
    }}<//>` : null}</details>`
}
