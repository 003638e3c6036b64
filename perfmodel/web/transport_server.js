// Answers of the local server, which `perfmodel web` starts.
const WHEN_SILENT = "start `perfmodel web` again";
const ask = async (verb, data, {signal, progress} = {}) => {
  const headers = {"Content-Type": "application/json", ...(progress ? {Accept: "application/x-ndjson"} : {})};
  const response = await fetch(`/api/${verb}`, {method: "POST", headers, body: JSON.stringify(data), signal});
  if (!(response.headers.get("Content-Type") || "").includes("ndjson")) {
    const found = await response.json();
    if (!response.ok) throw new Refused(found);
    return found;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the answer ended early");
    const lines = (text + value).split("\n");
    text = lines.pop();
    for (const line of lines.map(each => JSON.parse(each))) {
      if (line.answer) return line.answer;
      if (line.error) throw new Refused(line.error);
      progress(line.progress);
    }
  }
};
const askKnown = () => fetch("/api/known").then(response => response.json());
