// Reads the plan's data and fills the page.

const plan = JSON.parse(document.getElementById("plan").textContent);
for (const holder of document.querySelectorAll(".graph")) {
  const graph = holder.dataset.graph === "whole" ? plan.whole : plan.graphs[Number(holder.dataset.graph)];
  prepare(graph);
  const section = (name) => holder.querySelector(`section.${name}`);
  if (section("steps")) new Timeline(graph, section("steps"));
  if (section("chain")) new ChainPicture(graph, section("chain"));
  if (section("frontier")) new FrontierChart(graph, section("frontier"));
  const table = holder.querySelector(".decisions table");
  if (!table) continue;
  makeSortable(table);
  makeOpening(graph, table);
}
window.addEventListener("scroll", hideTip, { passive: true });
