// Answers of perfmodel in workers of this page: one for quick requests, one for searches. Cancelling a search terminates its worker.
const WHEN_SILENT = "load this page again";
const LONG = ["search", "explain"];
class Answerer {
  constructor() { this.waiting = new Map(); this.count = 0; this.worker = null; }
  start() {
    const own = this.worker = new Worker("worker.js", {type: "module"});
    own.onmessage = ({data: {number, line}}) => {
      const asked = this.waiting.get(number);
      if (!asked) return;
      if ("progress" in line) { if (asked.progress) asked.progress(line.progress); return; }
      this.waiting.delete(number);
      if (line.error) asked.reject(new Refused(line.error)); else asked.resolve(line.answer);
    };
    own.onerror = event => {
      const found = [...this.waiting.values()];
      this.waiting.clear();
      found.forEach(asked => asked.reject(new Error(event.message || "its worker did not start")));
    };
    for (const [number, {verb, data}] of this.waiting) own.postMessage({number, verb, data});
  }
  ask(verb, data, {signal, progress} = {}) {
    return new Promise((resolve, reject) => {
      const number = ++this.count;
      this.waiting.set(number, {verb, data, progress, resolve, reject});
      if (signal) signal.addEventListener("abort", () => {
        if (!this.waiting.delete(number)) return;
        this.worker.terminate();
        this.start();
        reject(new DOMException("cancelled", "AbortError"));
      });
      if (this.worker) this.worker.postMessage({number, verb, data}); else this.start();
    });
  }
}
const quick = new Answerer(), long = new Answerer();
const ask = (verb, data, of) => (LONG.includes(verb) || data.remedies ? long : quick).ask(verb, data, of);
const askKnown = () => ask("known", {});
document.getElementById("verdict").textContent = "Loading Python and perfmodel...";
