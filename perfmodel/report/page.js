const tip = document.body.appendChild(Object.assign(document.createElement("div"), {id: "tip", hidden: true}));
document.querySelectorAll("svg title").forEach(e => { e.parentNode.dataset.tip = e.textContent; e.remove(); });
document.querySelectorAll("[title]").forEach(e => { e.dataset.tip = e.title; e.removeAttribute("title"); });
const show = e => {
  const over = e.target.closest ? e.target.closest("[data-tip]") : null;
  tip.hidden = !over;
  if (!over) return;
  tip.textContent = over.dataset.tip;
  tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(e.clientY + 16, innerHeight - tip.offsetHeight - 8)) + "px";
};
addEventListener("pointermove", show);
addEventListener("pointerdown", show);
