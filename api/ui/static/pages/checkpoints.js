// Checkpoints of a job: their times and sizes as bars, and each as a row.

import { html, Card, Facts, Fresh, link, Shown, Status, Table } from "../parts.js"
import { bytes, clock, count, duration, moment } from "../format.js"
import { useViews } from "../polling.js"
import { Causes } from "./explanation.js"

export function Checkpoints({ job }) {
  const poll = useViews([`v1/jobs/${job}/checkpoints`, `v1/jobs/${job}/checkpoints/config`, `v1/jobs/${job}/checkpoints/explain`], 2)
  return html`<div class="title"><h1 tabindex="-1">Checkpoints</h1><${Fresh} poll=${poll} /></div>
    <${Shown} poll=${poll}>${([stats, config, explained]) => html`
      <${Card} title="Now" kind=${explained.is_usual ? "" : "attention"}><p class="why">${explained.summary}</p>${explained.is_usual ? null : html`<${Causes} job=${job} found=${explained} />`}<//>
      <${Card} title="The last ones" aside=${html`<span class="quiet">${count(stats.counts.completed)} completed, ${count(stats.counts.failed)} failed, ${count(stats.counts.in_progress)} in progress, ${count(stats.counts.restored)} restored</span>`}>
        <${Timeline} job=${job} history=${stats.history} />
        <${Table} caption="Checkpoints" rows=${stats.history} rowKey=${each => each.id} empty="None yet." columns=${columns(job)} /><//>
      <${Card} title="How they are taken"><${Facts} of=${[
        ["Mode", config.mode.replace("_", " ")], ["Every", duration(config.interval)], ["Timeout", duration(config.timeout)], ["Pause at least", duration(config.min_pause)],
        ["At a time", count(config.max_concurrent)], ["Unaligned", config.unaligned_checkpoints ? "yes" : "no"], ["State backend", config.state_backend],
        ["Typical duration", duration(stats.summary.end_to_end_duration.p50)], ["99 of 100 within", duration(stats.summary.end_to_end_duration.p99)],
        ["State, typically", bytes(stats.summary.state_size.p50)],
      ]} /><//>`}<//>`
}

const KINDS = { CHECKPOINT: "checkpoint", UNALIGNED_CHECKPOINT: "unaligned checkpoint", SAVEPOINT: "savepoint", SYNC_SAVEPOINT: "stop with savepoint" }

export const columns = job => [
  ["Checkpoint", each => html`<a href=${link("jobs", job, "checkpoints", each.id)}>${each.id}</a>`],
  ["State", each => html`<${Status} of=${each.status} />`],
  ["Kind", each => KINDS[each.checkpoint_type] || each.checkpoint_type],
  ["Triggered", each => moment(each.trigger_timestamp), "time"],
  ["Took", each => duration(each.end_to_end_duration), "number"],
  ["Acknowledged", each => `${each.num_acknowledged_subtasks} / ${each.num_subtasks}`, "number"],
  ["Stored", each => bytes(each.checkpointed_size), "number"],
  ["State size", each => bytes(each.state_size), "number"],
  ["Why it failed", each => each.failure_message || ""],
]

const BAR = 16, HEIGHT = 84

function Timeline({ job, history }) {
  const shown = [...history].sort((a, b) => a.id - b.id).slice(-60)
  const longest = Math.max(1, ...shown.map(each => each.end_to_end_duration))
  if (!shown.length) return null
  return html`<div class="scroll timeline" tabindex="0" role="region" aria-label="Durations of checkpoints">
    <svg width=${shown.length * BAR + 8} height=${HEIGHT + 18} viewBox=${`0 0 ${shown.length * BAR + 8} ${HEIGHT + 18}`}>
      ${shown.map((each, at) => {
        const height = Math.max(4, Math.log1p(Math.max(0, each.end_to_end_duration)) / Math.log1p(longest) * HEIGHT)
        const said = `checkpoint ${each.id}, ${each.status.toLowerCase().replace("_", " ")}, ${duration(each.end_to_end_duration)}, at ${clock(each.trigger_timestamp)}`
        return html`<a href=${link("jobs", job, "checkpoints", each.id)} aria-label=${said} class=${`bar ${each.status}${each.is_savepoint ? " savepoint" : ""}`}>
          <title>${said}</title><rect class="hit" x=${at * BAR} y="0" width=${BAR} height=${HEIGHT + 16} /><rect class="fill" x=${at * BAR + 3} y=${HEIGHT - height} width=${BAR - 6} height=${height} rx="2" />
          ${each.status === "FAILED" ? html`<path d=${`M${at * BAR + 4} ${HEIGHT + 5}l8 8m0 -8l-8 8`} class="cross" />` : null}</a>`
      })}
    </svg></div>
    <p class="quiet small">Height: duration, up to ${duration(longest)}, on a logarithmic scale. A cross: failed. An outline: savepoint.</p>`
}
