// What broke, what the job was restored from, and when its records flowed again.

import { html, Card, Fresh, link, Shown, Status } from "../parts.js"
import { clock, count, duration, moment } from "../format.js"
import { usePoll } from "../polling.js"

const KINDS = "failure,restart,state,leader"

export function Failures({ job }) {
  const poll = usePoll([`v1/jobs/${job}/history?kinds=${KINDS}&newest=true&limit=200`, `v1/jobs/${job}/exceptions`, `v1/jobs/${job}/plan`], 5_000)
  const series = usePoll(`v1/jobs/${job}/series?metric=records_out_per_second`, 10_000)
  return html`<div class="title"><h1 tabindex="-1">Failures</h1><${Fresh} poll=${poll} /></div>
    <${Shown} poll=${poll}>${([history, exceptions, { plan }]) => {
      const names = Object.fromEntries(plan.nodes.map(node => [node.id, node.description || node.id]))
      const stories = tell(history.records, series.data?.series || []).reverse()
      return html`${history.gaps.length || history.damage.length ? html`<${Card} title="Not everything is known" kind="attention"><ul>
          ${history.gaps.map(gap => html`<li>Records ${gap.after + 1} to ${gap.before === null ? "the end" : gap.before - 1} of epoch ${gap.epoch} are lost.</li>`)}
          ${history.damage.map(each => html`<li>${each.path}${each.line ? ` line ${each.line}` : ""}: ${each.reason}</li>`)}</ul><//>` : null}
        <${Card} title="What broke, and what came of it">${stories.length ? html`<ol class="stories">${stories.map(story => html`<${Story} job=${job} story=${story} names=${names} />`)}</ol>` : html`<p class="quiet">No failure is on record.</p>`}<//>
        ${exceptions.exceptionHistory.entries.length ? html`<${Card} title="Exceptions, as they were raised">
          ${exceptions.exceptionHistory.entries.map(each => html`<details><summary>${moment(each.timestamp)}: ${each.exceptionName}${each.taskName ? ` in ${each.taskName}` : ""}${each.location ? ` on ${each.location}` : ""}</summary><pre tabindex="0">${each.stacktrace}</pre></details>`)}<//>` : null}`
    }}<//>`
}

// Records in order -> stories: a failure, the attempt that followed, when the job ran again and when it wrote its first record.
export function tell(records, series) {
  const stories = []
  for (const { kind, at_ms: atMs, facts } of records) {
    const open = stories.at(-1)
    if (kind === "failure") stories.push({ atMs, ...facts })
    else if (kind === "restart" && open && open.restart === undefined) open.restart = { atMs, ...facts }
    else if (kind === "state" && facts.state === "RUNNING" && open && open.running === undefined && open.restart) open.running = atMs
    else if (kind === "leader" && facts.took_over) stories.push({ atMs, leader: facts, error: "another coordinator took over" })
  }
  for (const story of stories) story.firstRecord = story.restart ? firstRecord(series, story.restart.atMs) : null
  return stories
}

// The begin of the first time, as long as one point, in which records were written at or behind `afterMs`.
function firstRecord(series, afterMs) {
  const found = series.flatMap(({ times_ms: times, sum, resolution_ms: length }) => times.filter((time, at) => time + length > afterMs && sum[at] > 0 && times[0] <= afterMs).slice(0, 1).map(time => ({ time, length })))
  return found.sort((a, b) => a.time - b.time)[0] || null
}

function Story({ job, story, names }) {
  const { restart, running, firstRecord: first } = story
  if (story.leader) return html`<li><h3>${moment(story.atMs)} · ${story.error}</h3><p class="quiet">Attempt ${count(story.leader.attempt)} runs on, behind checkpoint ${count(story.leader.newest_checkpoint)}.</p></li>`
  return html`<li><h3>${moment(story.atMs)} · attempt ${count(story.attempt)} failed</h3>
    <p class="why">${story.error}</p>
    ${story.vertex || story.slot >= 0 ? html`<p class="quiet">${story.vertex ? `${names[story.vertex] || story.vertex}${story.subtask >= 0 ? ` subtask ${story.subtask}` : ""}` : ""}${story.slot >= 0 ? ` in slot ${story.slot}` : ""}</p>` : null}
    ${story.frames ? html`<details><summary>Where</summary><pre tabindex="0">${story.frames}</pre></details>` : null}
    <ul class="steps">
      <li>${story.restart_in_ms === null ? html`<${Status} of="FAILED" /> no attempt follows` : `restart ${count(story.restarts)}, after a pause of ${duration(story.restart_in_ms)}`}</li>
      ${restart ? html`<li>${clock(restart.atMs)} attempt ${count(restart.attempt)}, restored from ${restart.checkpoint_id > 0 ? html`<a href=${restart.folder ? link("jobs", job, "snapshots", restart.folder) : link("jobs", job, "checkpoints", restart.checkpoint_id)}>${restart.savepoint ? "savepoint" : "checkpoint"} ${restart.checkpoint_id}</a>` : "nothing: it began empty"}${restart.replayed !== null && restart.replayed !== undefined ? `; ${count(restart.replayed)} records are read again` : ""}</li>` : null}
      ${running ? html`<li>${clock(running)} all tasks run, ${duration(running - story.atMs)} after the failure</li>` : null}
      ${first ? html`<li>first record again between ${clock(Math.max(first.time, restart.atMs))} and ${clock(first.time + first.length)}</li>` : null}
    </ul></li>`
}
