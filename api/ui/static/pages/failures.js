// What broke, what the job was restored from, and when its records flowed again.

import { useState } from "../vendor/preact/hooks.mjs"
import { html, Card, Fresh, link, Problem, Shown, Status } from "../parts.js"
import { clock, count, duration, moment } from "../format.js"
import { usePoll } from "../polling.js"
import { get } from "../session.js"

export function Failures({ job }) {
  const path = `v1/jobs/${job}/failures?limit=50`
  const poll = usePoll([path, `v1/jobs/${job}/history?kinds=failure,leader&newest=true&limit=200`, `v1/jobs/${job}/exceptions`, `v1/jobs/${job}/plan`], 5_000)
  const [older, setOlder] = useState({ failures: [], since: null, error: null })
  const more = async since => {
    try {
      const { data } = await get(`${path}&before=${encodeURIComponent(since)}`)
      setOlder(before => ({ failures: [...before.failures, ...data.failures], since: data.since, error: null }))
    } catch (error) { setOlder(before => ({ ...before, error })) }
  }
  return html`<div class="title"><h1 tabindex="-1">Failures</h1><${Fresh} poll=${poll} /></div>
    <${Shown} poll=${poll}>${([page, history, exceptions, { plan }]) => {
      const names = Object.fromEntries(plan.nodes.map(node => [node.id, node.description || node.id]))
      const records = Object.fromEntries(history.records.map(each => [`${each.epoch}-${each.number}`, each]))
      const leaders = history.records.filter(each => each.kind === "leader" && each.facts.took_over)
      const failures = [...page.failures, ...older.failures]
      const stories = [
        ...failures.map(each => [each.at_ms, html`<${Story} key=${each.position} job=${job} story=${each} names=${names} frames=${records[each.position]?.facts.frames} />`]),
        ...leaders.map(each => [each.at_ms, html`<${TakeOver} key=${`${each.epoch}-${each.number}`} at=${each.at_ms} facts=${each.facts} />`]),
      ].sort(([a], [b]) => b - a).map(([, story]) => story)
      const since = older.since ?? page.since
      return html`${history.gaps.length || history.damage.length ? html`<${Card} title="Not everything is known" kind="attention"><ul>
          ${history.gaps.map(gap => html`<li>Records ${gap.after + 1} to ${gap.before === null ? "the end" : gap.before - 1} of epoch ${gap.epoch} are lost.</li>`)}
          ${history.damage.map(each => html`<li>${each.path}${each.line ? ` line ${each.line}` : ""}: ${each.reason}</li>`)}</ul><//>` : null}
        <${Card} title="What broke, and what came of it">${stories.length ? html`<ol class="stories">${stories}</ol>` : html`<p class="quiet">No failure is on record.</p>`}
          <${Problem} error=${older.error} />
          ${since ? html`<p class="buttons"><button type="button" onClick=${() => more(since)}>Older failures</button></p>` : null}<//>
        ${exceptions.exceptionHistory.entries.length ? html`<${Card} title="Exceptions, as they were raised">
          ${exceptions.exceptionHistory.entries.map(each => html`<details><summary>${moment(each.timestamp)}: ${each.exceptionName}${each.taskName ? ` in ${each.taskName}` : ""}${each.location ? ` on ${each.location}` : ""}</summary><pre tabindex="0">${each.stacktrace}</pre></details>`)}<//>` : null}`
    }}<//>`
}

const TakeOver = ({ at, facts }) => html`<li><h3>${moment(at)} · another coordinator took over</h3><p class="quiet">Attempt ${count(facts.attempt)} runs on, behind checkpoint ${count(facts.newest_checkpoint)}.</p></li>`

function Story({ job, story, names, frames }) {
  const { restart } = story
  const source = restart && (restart.checkpoint_id > 0
    ? html`<a href=${link("jobs", job, "checkpoints", restart.checkpoint_id)}>${restart.savepoint ? "savepoint" : "checkpoint"} ${restart.checkpoint_id}</a>`
    : "nothing: it began empty")
  return html`<li><h3>${moment(story.at_ms)} · attempt ${count(story.attempt)} failed</h3>
    <p class="why">${story.error}</p>
    ${story.vertex || story.slot >= 0 ? html`<p class="quiet">${story.vertex ? `${names[story.vertex] || story.vertex}${story.subtask >= 0 ? ` subtask ${story.subtask}` : ""}` : ""}${story.slot >= 0 ? ` in slot ${story.slot}` : ""}</p>` : null}
    ${frames ? html`<details><summary>Where</summary><pre tabindex="0">${frames}</pre></details>` : null}
    <ul class="steps">
      <li>${story.restart_in_ms === null ? html`<${Status} of="FAILED" /> no attempt follows` : `restart ${count(story.restarts)}, after a pause of ${duration(story.restart_in_ms)}`}</li>
      ${restart ? html`<li>${clock(restart.at_ms)} attempt ${count(restart.attempt)}, restored from ${source}${restart.replayed !== null ? `; ${count(restart.replayed)} records are read again` : ""}</li>` : null}
      ${restart?.first_record_ms > 0 ? html`<li>${clock(restart.first_record_ms)} first record again, ${duration(restart.gap_ms)} after the failure${restart.heartbeat_ms > 0 ? html` <small>workers tell it with a heartbeat, every ${duration(restart.heartbeat_ms)}</small>` : null}</li>`
        : restart ? html`<li>no record of it is told yet</li>` : null}
    </ul></li>`
}
