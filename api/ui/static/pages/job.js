// One job: is my data safe, why is it slow, where will it resume; then its operators and their rates.

import { useEffect, useState } from "../vendor/preact/hooks.mjs"
import { html, Card, Fresh, link, Shown, Status, Table } from "../parts.js"
import { count, duration, newest, percent, rate } from "../format.js"
import { usePoll, useViews } from "../polling.js"
import { OperatorGraph, ordered } from "../graph.js"
import { Lines } from "../chart.js"

// Shares of the graph are of the last second, as those of the verdict beside it; rates, and what is charted, of the series' buckets.
const METRICS = ["records_in_per_second", "records_out_per_second", "busy_ratio", "backpressured_ratio", "watermark_lag_ms"]
const CHARTED_MAX = 6

export function Job({ job: jobId, name }) {
  const poll = useViews([`v1/jobs/${jobId}`, `v1/jobs/${jobId}/health`])
  const series = usePoll(`v1/jobs/${jobId}/series?metric=${METRICS.join(",")}`, 5_000)
  const narrow = useNarrow()
  return html`<div class="title"><h1 tabindex="-1">${name}</h1>${poll.data ? html`<${Status} of=${poll.data[0].state} />` : null}<${Fresh} poll=${poll} /></div>
    <${Shown} poll=${poll}>${([job, health]) => {
      const nodes = ordered(job.plan.nodes)
      const [into, out, busy, held, lag] = METRICS.map(metric => byVertex(series.data, metric))
      const shares = Object.fromEntries((health.slow.vertices || []).map(each => [each.vertex, each]))
      const figures = Object.fromEntries(nodes.map(({ id }) => [id, {
        in: newest(into[id]?.sum || []), out: newest(out[id]?.sum || []), busy: shares[id]?.busy,
        backpressured: shares[id]?.backpressured, lag: newest(lag[id]?.max || []),
      }]))
      const over = series.data?.series.length ? `, over ${duration(series.data.series[0].resolution_ms)}` : ""
      return html`<${Questions} jobId=${jobId} health=${health} />
        <${Card} title="Operators"><p class="quiet">Busy and backpressured: worst subtask, in its last second.</p><${OperatorGraph} jobId=${jobId} nodes=${nodes} figures=${figures} narrow=${narrow} />
          <${Operators} jobId=${jobId} job=${job} nodes=${nodes} figures=${figures} /><//>
        <div class="charts">
          <${Charted} title="Records into each operator, per second" found=${into} of="sum" nodes=${nodes} format=${rate} />
          <${Charted} title=${`Backpressured, worst subtask${over}`} found=${held} of="max" nodes=${nodes} format=${percent} ceiling=${1} />
          <${Charted} title=${`Busy, worst subtask${over}`} found=${busy} of="max" nodes=${nodes} format=${percent} ceiling=${1} />
          <${Charted} title="Watermark lag, worst subtask" found=${lag} of="max" nodes=${nodes} format=${duration} />
        </div>`
    }}<//>`
}

const byVertex = (answer, metric) => Object.fromEntries((answer?.series || []).filter(each => each.metric === metric).map(each => [each.vertex, each]))

function useNarrow() {
  const [narrow, setNarrow] = useState(innerWidth < 700)
  useEffect(() => {
    const look = () => setNarrow(innerWidth < 700)
    addEventListener("resize", look)
    return () => removeEventListener("resize", look)
  }, [])
  return narrow
}

function Questions({ jobId, health }) {
  const { safe, slow, resume } = health
  const when = ms => ms > 0 ? new Date(ms).toLocaleString() : safe.are_drills_known ? "never" : "not known yet"
  return html`<div class="questions">
    <${Question} title="Is my data safe?" view=${safe}>
      ${safe.checkpoint_id > 0 ? html`<p><a href=${link("jobs", jobId, "checkpoints", safe.checkpoint_id)}>Checkpoint ${safe.checkpoint_id}</a>, ${duration(safe.age_ms)} old. A failure now replays ${safe.replay_records >= 0 ? `${count(safe.replay_records)} records, ` : ""}${duration(safe.replay_ms)}.</p>` : null}
      <p class="quiet">Every file read: ${when(safe.verified_ms)}. Restored for a trial: ${when(safe.drilled_ms)}.</p><//>
    <${Question} title="Why is it slow?" view=${slow}>
      ${slow.bottleneck ? html`<p>${slow.bottleneck.vertex}${slow.bottleneck.subtask >= 0 ? ` subtask ${slow.bottleneck.subtask}` : ""}${slow.bottleneck.host ? ` on ${slow.bottleneck.host}` : ""}${slow.busy >= 0 ? `: busy ${percent(slow.busy)} of its last second.` : ": how busy it is, is not known."}</p>` : null}
      <p class="quiet">Highest backpressure ${percent(slow.backpressured)}, watermark lag ${duration(slow.watermark_lag_ms)}. <a href=${link("jobs", jobId, "checkpoints")}>Why a checkpoint is late</a></p><//>
    <${Question} title="Where will it resume?" view=${resume}>
      ${resume.location ? html`<p><a href=${link("jobs", jobId, "snapshots", resume.location)}>${resume.location}</a></p>` : null}
      ${resume.sources.length ? html`<p class="quiet">${resume.sources.slice(0, 4).map(place).join(", ")}${resume.sources.length > 4 ? `, and ${resume.sources.length - 4} more sources` : ""}.${resume.positions_of >= 0 && resume.positions_of < resume.checkpoint_id ? ` Positions of checkpoint ${resume.positions_of}; those of ${resume.checkpoint_id} are being read.` : ""}</p>` : null}
      ${resume.may_repeat.length ? html`<p>Output may repeat: ${resume.may_repeat.map(each => each.vertex).join(", ")}.</p>` : null}<//>
  </div>`
}

// Of a source: where its state says that it goes on; without that, how much it had read.
function place(source) {
  if (!source.positions.length) return source.records >= 0 ? `${source.uid} at record ${count(source.records)}` : `${source.uid} at its beginning`
  const more = source.splits - Math.min(4, source.positions.length)
  return `${source.uid} (${source.positions.slice(0, 4).join(", ")}${more > 0 ? ` and ${count(more)} more` : ""})`
}

const Question = ({ title, view, children }) => html`<section class=${`card question ${view.verdict}`}><header><h2>${title}</h2><${Status} of=${view.verdict} /></header><p class="why">${view.why}</p>${children}</section>`

function Operators({ jobId, job, nodes, figures }) {
  const states = Object.fromEntries(job.vertices.map(each => [each.id, each]))
  return html`<details><summary>As a table</summary><${Table} caption="Operators" rows=${nodes} rowKey=${node => node.id} columns=${[
    ["Operator", node => html`<a href=${link("jobs", jobId, "vertices", node.id)}>${node.description || node.id}</a>`],
    ["State", node => html`<${Status} of=${states[node.id]?.status || "CREATED"} />`],
    ["Parallelism", node => count(node.parallelism), "number"],
    ["In", node => rate(figures[node.id].in), "number"],
    ["Out", node => rate(figures[node.id].out), "number"],
    ["Busy", node => percent(figures[node.id].busy), "number"],
    ["Backpressured", node => percent(figures[node.id].backpressured), "number"],
    ["Watermark lag", node => duration(figures[node.id].lag), "number"],
  ]} /></details>`
}

function Charted({ title, found, of, nodes, format, ceiling }) {
  const chosen = nodes.filter(node => found[node.id] && newest(found[node.id][of]) !== null).slice(0, CHARTED_MAX)
  if (!chosen.length) return html`<figure class="chart"><figcaption>${title}</figcaption><p class="quiet">Nothing told yet.</p></figure>`
  const timesMs = found[chosen[0].id].times_ms
  const lines = chosen.map(node => ({ label: node.description || node.id, values: found[node.id][of] })).filter(line => line.values.length === timesMs.length)
  return html`<${Lines} title=${title} timesMs=${timesMs} lines=${lines} format=${format} ceiling=${ceiling} />`
}
