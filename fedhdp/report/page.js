"use strict";
(() => {
  const root = document.documentElement;
  let data = {};
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function scale([low, high, start, end, log]) {
    const f = log ? Math.log10 : (v) => v;
    return (v) => (f(high) > f(low) ? start + ((f(v) - f(low)) / (f(high) - f(low))) * (end - start) : (start + end) / 2);
  }

  const path = (points) => "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

  // An exponential average whose first values are not pulled to zero.
  function smoothed(values, share) {
    let sum = 0, weight = 0;
    return values.map((v) => {
      sum = share * sum + v;
      weight = share * weight + 1;
      return sum / weight;
    });
  }

  function smoothChart(id, chart, share) {
    const x = scale(chart.x), y = scale(chart.y);
    document.querySelectorAll(`#${id} .series`).forEach((group) => {
      const line = chart.lines[group.dataset.line];
      const ys = smoothed(line.p.map((p) => p[1]), share);
      group.querySelector(".line").setAttribute("d", path(ys.map((v, i) => [x(line.p[i][0]), y(v)])));
      group.querySelectorAll("circle").forEach((dot, i) => dot.setAttribute("cy", y(ys[i]).toFixed(1)));
      const band = group.querySelector(".band");
      if (!band) return;
      const halves = smoothed(line.h, share);
      const [least, most] = chart.lim || [-Infinity, Infinity];
      const edge = (sign) => ys.map((v, i) => [x(line.p[i][0]), y(Math.min(Math.max(v + sign * halves[i], least), most))]);
      band.setAttribute("d", path([...edge(1), ...edge(-1).reverse()]));
    });
  }

  function smoothAll() {
    const input = document.getElementById("smooth");
    if (!input) return;
    for (const [id, chart] of Object.entries(data.charts || {})) {
      if (chart.smooth) smoothChart(id, chart, Number(input.value));
    }
  }

  function isHidden(line) {
    return line.v.every((number) => {
      const box = document.getElementById(`show-${number}`);
      return Boolean(box) && !box.checked;
    });
  }

  function readOut(svg, chart) {
    const x = scale(chart.x);
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cursor.setAttribute("class", "cursor");
    svg.append(cursor);
    const hide = () => {
      tip.hidden = true;
      cursor.removeAttribute("d");
    };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const place = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const shown = chart.lines.filter((line) => !isHidden(line));
      const xs = [...new Set(shown.flatMap((line) => line.p.map((p) => p[0])))];
      if (!xs.length) return hide();
      const near = xs.reduce((a, b) => (Math.abs(x(b) - place) < Math.abs(x(a) - place) ? b : a));
      cursor.setAttribute("d", `M${x(near)} 12V238`);
      const rows = [[chart.xl, chart.places.length ? chart.places[near] : near]];
      for (const line of shown) {
        const i = line.p.findIndex((p) => p[0] === near);
        if (i >= 0) rows.push([line.n.length > 60 ? line.n.slice(0, 59) + "…" : line.n, line.t[i]]);
      }
      tip.replaceChildren(...rows.map(([label, value]) => {
        const [div, name] = ["div", "bdi"].map((tag) => document.createElement(tag));
        name.textContent = label; // whose direction of writing ends with it
        div.append(name, `: ${value}`);
        return div;
      }));
      tip.hidden = false;
      const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
      tip.style.left = `${Math.max(8, left)}px`;
      tip.style.top = `${Math.max(8, Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8))}px`;
    });
  }

  function numberOf(cell) {
    const words = cell.textContent.replace(/,/g, "").split("→").pop();
    if (words.includes("∞")) return Infinity;
    const match = words.match(/[-+−]?\d+(\.\d+)?(e[-+]?\d+)?/);
    return match ? Number(match[0].replace("−", "-")) : -Infinity;
  }

  function makeSortable(table) {
    table.querySelectorAll("th button").forEach((button) => {
      button.addEventListener("click", () => {
        const head = button.closest("th");
        const column = [...head.parentNode.children].indexOf(head);
        const rises = head.getAttribute("aria-sort") === "descending";
        table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", rises ? "ascending" : "descending");
        const isText = head.classList.contains("text");
        const order = (a, b) => {
          const [one, two] = [a, b].map((row) => row.children[column]);
          if (isText) return one.textContent.localeCompare(two.textContent);
          const [left, right] = [numberOf(one), numberOf(two)];
          return left === right ? 0 : left < right ? -1 : 1;
        };
        const rows = [...table.tBodies[0].rows].sort(order);
        table.tBodies[0].append(...(rises ? rows : rows.reverse()));
      });
    });
  }

  async function copy(button) {
    const area = button.closest(".copyable").querySelector("textarea");
    try {
      await navigator.clipboard.writeText(area.value);
    } catch {
      const details = button.closest("details");
      details.open = true;
      area.select();
      document.execCommand("copy");
    }
    const before = button.dataset.label || button.textContent;
    button.dataset.label = before;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = before; }, 1500);
  }

  function start() {
    data = JSON.parse(document.getElementById("data").textContent);
    for (const [id, chart] of Object.entries(data.charts || {})) {
      const svg = document.getElementById(id);
      if (svg) readOut(svg, chart);
    }
    document.querySelectorAll("table.sortable").forEach(makeSortable);
    document.querySelectorAll("button.copy").forEach((button) => {
      button.addEventListener("click", (event) => {
        event.preventDefault();
        copy(button);
      });
    });
    const input = document.getElementById("smooth");
    if (input) input.addEventListener("input", smoothAll);
    smoothAll();
  }

  // A live page replaces its content when the run has gone on, and keeps what the reader has chosen.
  async function refresh() {
    try {
      const version = await (await fetch(data.refresh, { cache: "no-store" })).text();
      if (version !== data.version) {
        const next = new DOMParser().parseFromString(await (await fetch("/", { cache: "no-store" })).text(), "text/html");
        const kept = [...document.querySelectorAll("input[id]")].map((i) => [i.id, i.checked, i.value]);
        for (const part of ["style", "main"]) document.querySelector(part).replaceWith(next.querySelector(part));
        document.getElementById("data").textContent = next.getElementById("data").textContent;
        for (const [id, checked, value] of kept) {
          const input = document.getElementById(id);
          if (input) Object.assign(input, { checked, value });
        }
        tip.hidden = true;
        start();
      }
    } catch { /* the server has ended; the page stays as it is */ }
    setTimeout(refresh, 2000);
  }

  root.classList.add("scripted");
  start();
  if (data.refresh) setTimeout(refresh, 2000);
})();
