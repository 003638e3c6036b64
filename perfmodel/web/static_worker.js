// perfmodel in a worker of the static page, run by Pyodide.
const runtime = new URL("$runtime", import.meta.url).href;
const PACKAGES = $packages;
const start = async () => {
  const {loadPyodide} = await import(`$${runtime}pyodide.mjs`);
  const [python, archive, lock] = await Promise.all([
    loadPyodide({indexURL: runtime}),
    fetch(new URL("perfmodel.zip", import.meta.url)).then(response => response.arrayBuffer()),
    fetch(`$${runtime}pyodide-lock.json`).then(response => response.json()),
  ]);
  await python.loadPackage(PACKAGES.filter(name => name in lock.packages), {messageCallback: () => {}});
  python.unpackArchive(archive, "zip", {extractDir: "/perfmodel"});
  return python.runPython(`
import json, sys
sys.path.insert(0, "/perfmodel")
from perfmodel.web.answers import answer_line
lambda verb, data, report: json.dumps(answer_line(verb, json.loads(data), report))
`);
};
const started = start();
onmessage = async ({data: {number, verb, data}}) => {
  const reply = line => postMessage({number, line});
  try {
    const answer = await started;
    reply(JSON.parse(answer(verb, JSON.stringify(data), share => { reply({progress: share}); })));
  } catch (error) {
    reply({error: {code: "failed", field: "", value: "", message: `perfmodel did not start: $${String(error.message || error).trim().split("\n").pop()}`, suggestions: []}});
  }
};
