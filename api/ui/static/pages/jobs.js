// All jobs of the service.

import { html, Card, Fresh, link, Shown, Status, Table } from "../parts.js"
import { count, duration, moment } from "../format.js"
import { useViews } from "../polling.js"

export const Jobs = ({ session }) => session.job ? html`<${OneJob} jobId=${session.job} />` : html`<${AllJobs} />`

// Of a token for one job alone, which is refused every list. It may have been issued before the job is submitted for the first time.
function OneJob({ jobId }) {
  const poll = useViews([`v1/jobs/${jobId}`])
  return html`<div class="title"><h1 tabindex="-1">Jobs</h1><${Fresh} poll=${poll} /></div>
    <${Shown} poll=${poll} missing=${`Your token is for job ${jobId} alone, which has not been submitted yet.`}>${rows => html`
      <${Card} title="The job that your token is for"><${Table} caption="Jobs" rows=${rows} columns=${[
        ["Job", each => html`<a href=${link("jobs", each.jid)}>${each.name}</a>`],
        ["State", each => html`<${Status} of=${each.state} />`],
        ["Started", each => moment(each["start-time"]), "time"],
        ["For", each => duration(each.duration), "number"],
      ]} /><//>`}<//>`
}

function AllJobs() {
  const poll = useViews(["v1/jobs/overview", "v1/totals", "v1/overview"])
  return html`<div class="title"><h1 tabindex="-1">Jobs</h1><${Fresh} poll=${poll} /></div>
    <${Shown} poll=${poll}>${([{ jobs }, totals, overview]) => {
      const numbers = Object.fromEntries(totals.jobs.map(each => [each.jid, each]))
      const sorted = [...jobs].sort((a, b) => Number(b["end-time"] < 0) - Number(a["end-time"] < 0) || b["start-time"] - a["start-time"])
      const unreadable = totals.unreadable ?? []
      return html`${unreadable.length ? html`<${Card} title="Jobs that nobody leads, since their records can't be read" kind="attention"><ul>
          ${unreadable.map(each => html`<li key=${each.jid}><code>${each.jid}</code>: ${each.reason}</li>`)}
        </ul><//>` : null}
        <${Card} title="What runs, and what has ended" aside=${html`<span class="quiet">${count(overview["jobs-running"])} running, ${count(overview["slots-total"] - overview["slots-available"])} of ${count(overview["slots-total"])} slots taken</span>`}>
        <${Table} caption="Jobs" rows=${sorted} rowKey=${job => job.jid} empty="No job yet. A driver submits one with coordinator= and the address of this service." columns=${[
          ["Job", job => html`<a href=${link("jobs", job.jid)}>${job.name}</a>`],
          ["State", job => html`<${Status} of=${job.state} />`],
          ["Tasks", job => `${job.tasks.running} / ${job.tasks.total}`, "number"],
          ["Records in", job => count(numbers[job.jid]?.records_in), "number"],
          ["Records out", job => count(numbers[job.jid]?.records_out), "number"],
          ["Restarts", job => count(numbers[job.jid]?.restarts), "number"],
          ["Backpressure", job => numbers[job.jid]?.backpressure ? html`<${Status} of=${numbers[job.jid].backpressure} />` : "–"],
          ["Started", job => moment(job["start-time"]), "time"],
          ["For", job => duration(job.duration), "number"],
        ]} /><//>`
    }}<//>`
}
