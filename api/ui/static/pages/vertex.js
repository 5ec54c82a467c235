// One operator: its subtasks side by side, and their last 15 minutes.

import { useState } from "../vendor/preact/hooks.mjs"
import { html, Card, Fresh, Shares, Shown, Status, Table } from "../parts.js"
import { bytes, count, duration, moment, newest, percent, rate } from "../format.js"
import { usePoll, useViews } from "../polling.js"
import { Lines } from "../chart.js"

const METRICS = ["records_in_per_second", "busy_ratio", "backpressured_ratio", "idle_ratio", "watermark_lag_ms"]
const SHOWN_MAX = 100
const CHARTED_MAX = 6

export function Vertex({ job, vertex }) {
  const poll = useViews([`v1/jobs/${job}/vertices/${vertex}`, `v1/jobs/${job}/vertices/${vertex}/watermarks`])
  const [first, setFirst] = useState(0)
  const total = poll.data?.[0].parallelism ?? 0
  const named = total > SHOWN_MAX ? Array.from({ length: Math.min(SHOWN_MAX, total - first) }, (_, at) => first + at).join(",") : ""
  const series = usePoll(total ? `v1/jobs/${job}/series?metric=${METRICS.join(",")}&vertex=${vertex}&subtasks=${named}` : null, 5_000)
  return html`<div class="title"><h1 tabindex="-1">${poll.data?.[0].name || "Operator"}</h1><${Fresh} poll=${poll} /></div>
    <${Shown} poll=${poll}>${([found, watermarks]) => {
      const [into, busy, held, idle, lag] = METRICS.map(metric => series.data?.series.find(each => each.metric === metric))
      const last = (each, subtask) => newest(each?.subtasks[subtask] || [])
      const over = series.data?.series.length ? `, over ${duration(series.data.series[0].resolution_ms)}` : ""
      const marks = Object.fromEntries(watermarks.map(each => [each.id.split(".")[0], Number(each.value)]))
      return html`<${Card} title=${`Subtasks${total > SHOWN_MAX ? ` ${first} to ${Math.min(first + SHOWN_MAX, total) - 1} of ${count(total)}` : ""}`}>
        <${Table} caption="Subtasks" rows=${found.subtasks.slice(first, first + SHOWN_MAX)} rowKey=${each => each.subtask} columns=${[
          ["Subtask", each => each.subtask],
          ["State", each => html`<${Status} of=${each.status} />`],
          ["Host", each => each.endpoint],
          ["Attempt", each => count(each.attempt), "number"],
          [`Busy, backpressured, idle${over}`, each => html`<${Shares} label=${`busy ${percent(last(busy, each.subtask))}, backpressured ${percent(last(held, each.subtask))}, idle ${percent(last(idle, each.subtask))}`} parts=${[["busy", last(busy, each.subtask)], ["held", last(held, each.subtask)], ["idle", last(idle, each.subtask)]]} /><small>${percent(last(busy, each.subtask))} · ${percent(last(held, each.subtask))} · ${percent(last(idle, each.subtask))}</small>`],
          ["Rate in", each => rate(last(into, each.subtask)), "number"],
          ["Records in", each => count(each.metrics["read-records"]), "number"],
          ["Records out", each => count(each.metrics["write-records"]), "number"],
          ["Bytes in", each => bytes(each.metrics["read-bytes"]), "number"],
          ["Watermark", each => marks[each.subtask] > 0 ? moment(marks[each.subtask]) : "–", "time"],
          ["Lag", each => duration(last(lag, each.subtask)), "number"],
          ["For", each => duration(each.duration), "number"],
        ]} />
        ${total > SHOWN_MAX ? html`<p class="buttons"><button type="button" disabled=${first === 0} onClick=${() => setFirst(first - SHOWN_MAX)}>Previous ${SHOWN_MAX}</button><button type="button" disabled=${first + SHOWN_MAX >= total} onClick=${() => setFirst(first + SHOWN_MAX)}>Next ${SHOWN_MAX}</button></p>` : null}<//>
        <div class="charts">${[[into, "Records in, per second", rate], [busy, `Busy${over}`, percent, 1], [held, `Backpressured${over}`, percent, 1], [lag, "Watermark lag", duration]].filter(([each]) => each).map(([each, title, format, ceiling]) => {
          const chosen = Object.entries(each.subtasks).sort(([, a], [, b]) => (newest(b) ?? -1) - (newest(a) ?? -1)).slice(0, CHARTED_MAX)
          return html`<${Lines} title=${`${title}${Object.keys(each.subtasks).length > CHARTED_MAX ? `, highest ${CHARTED_MAX} subtasks` : ""}`} timesMs=${each.times_ms} lines=${chosen.map(([subtask, values]) => ({ label: `subtask ${subtask}`, values }))} format=${format} ceiling=${ceiling} />`
        })}</div>`
    }}<//>`
}
