// Numbers, sizes and times as people read them. -1, null and undefined are "not known".

export const NOT_KNOWN = "–"
const isKnown = value => value !== null && value !== undefined && !(typeof value === "number" && (value < 0 || Number.isNaN(value)))

// Durations, sizes and shares are as coordinator/figures.py writes them: times cut off, as a clock does, the others rounded.
export function duration(ms) {
  if (!isKnown(ms)) return NOT_KNOWN
  if (ms < 1000) return `${Math.floor(ms)} ms`
  const seconds = Math.floor(ms / 1000)
  if (seconds < 60) return `${(Math.floor(ms / 100) / 10).toFixed(1)} s`
  const [minutes, hours, days] = [Math.floor(seconds / 60), Math.floor(seconds / 3600), Math.floor(seconds / 86_400)]
  if (hours < 1) return `${minutes} min ${two(seconds % 60)} s`
  return days < 1 ? `${hours} h ${two(minutes % 60)} min` : `${days} d ${two(hours % 24)} h`
}

export function bytes(size) {
  if (!isKnown(size)) return NOT_KNOWN
  if (size < 1023.5) return `${Math.round(size)} B`
  const units = ["KiB", "MiB", "GiB", "TiB", "PiB"]
  let unit = 0
  size /= 1024
  while (Math.round(size * 10) >= 10_240 && unit < units.length - 1) { size /= 1024; unit += 1 }
  return `${(Math.round(size * 10) / 10).toFixed(1)} ${units[unit]}`
}

export function count(value) {
  return isKnown(value) ? Math.round(value).toLocaleString("en-US") : NOT_KNOWN
}

export function rate(value) {
  if (!isKnown(value)) return NOT_KNOWN
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M/s`
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k/s`
  return `${value >= 100 || value === 0 ? Math.round(value) : value.toFixed(1)} /s`
}

export function percent(share) {
  return isKnown(share) ? `${Math.round(share * 100)} %` : NOT_KNOWN
}

const two = number => String(number).padStart(2, "0")

export function clock(ms) {
  if (!isKnown(ms)) return NOT_KNOWN
  const time = new Date(ms)
  return `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`
}

export function moment(ms) {
  if (!isKnown(ms)) return NOT_KNOWN
  const time = new Date(ms)
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${clock(ms)}`
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`

// Newest value that is known of a series.
export function newest(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null) return values[index]
  return null
}
