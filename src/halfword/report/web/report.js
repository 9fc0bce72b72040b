"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const RUN_COLOURS = 7, PART_COLOURS = 6;

// The value that a custom property has in the colours now in force.
function colour(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

const runColour = (index) => colour(`run-${index % RUN_COLOURS}`);
const partColour = (index) => colour(`part-${index % PART_COLOURS}`);

function element(name, text = "", children = []) {
  const made = document.createElement(name);
  made.textContent = text; // never as HTML: a run may have any name
  made.append(...children);
  return made;
}

// A tooltip: a title, then a row of a coloured dot, a name and values for each thing.
function tip(title, header, rows) {
  const cells = (kind, texts) => texts.map((text) => element(kind, text));
  const head = element("tr", "", cells("th", [title, ...header]));
  const body = rows.map(({ colour, name, values }) => {
    const dot = element("i");
    dot.style.background = colour;
    const label = element("th", "", [dot, name]);
    return element("tr", "", [label, ...cells("td", values)]);
  });
  const box = element("div", "", [element("table", "", [head, ...body])]);
  box.className = "tip";
  return box;
}

function base(formatter) {
  const ink = colour("ink"), quiet = colour("quiet"), line = colour("line");
  const axis = (name) => ({
    name,
    nameLocation: "middle",
    nameTextStyle: { color: ink },
    axisLabel: { color: quiet },
    axisLine: { lineStyle: { color: quiet } },
    splitLine: { lineStyle: { color: line } },
  });
  const option = {
    animation: false,
    textStyle: { fontFamily: "system-ui, sans-serif" },
    legend: {
      type: "scroll",
      top: 0,
      textStyle: { color: ink, width: 260, overflow: "truncate" },
      inactiveColor: line,
      pageTextStyle: { color: quiet },
      pageIconColor: ink,
    },
    tooltip: {
      trigger: "axis",
      confine: true,
      formatter,
      backgroundColor: colour("surface"),
      borderColor: quiet,
      textStyle: { color: ink },
      axisPointer: { lineStyle: { color: quiet }, label: { show: false } },
    },
  };
  return { option, axis };
}

const digits = (value) => (typeof value === "number" ? String(Number(value.toPrecision(7))) : value ?? "-");
const signed = (value) => (typeof value === "number" && value > 0 ? "+" : "") + digits(Number.isFinite(value) ? Number(value.toPrecision(3)) : value);

function lossOption() {
  const { steps, runs } = data.loss;
  const several = runs.length > 1;
  const names = runs.map((run) => run.label + (run.equals === null ? "" : ` (= ${run.equals})`));
  const { option, axis } = base(([point]) => lossTip(point.value[0]));
  const first = steps[0], last = steps[steps.length - 1];
  const x = { ...axis("step"), type: "value", min: first, max: last, minInterval: 1, nameGap: 24, splitLine: { show: false } };
  const y = { ...axis("training loss (nats per token)"), type: "value", scale: true, nameGap: 52 };
  const grid = { left: 76, right: 24 };
  const zoomed = { xAxisIndex: several ? [0, 1] : [0] };
  option.grid = several
    ? [{ ...grid, top: 40, height: "50%" }, { ...grid, top: "66%", bottom: 84 }]
    : [{ ...grid, top: 40, bottom: 84 }];
  option.xAxis = several ? [{ ...x, name: "", gridIndex: 0 }, { ...x, gridIndex: 1 }] : [x];
  option.yAxis = several ? [y, { ...y, name: "minus the first run's", gridIndex: 1 }] : [y];
  option.axisPointer = { link: [{ xAxisIndex: "all" }] };
  option.dataZoom = [
    { type: "inside", ...zoomed, zoomOnMouseWheel: "ctrl", moveOnMouseMove: "shift", moveOnMouseWheel: false },
    { type: "slider", ...zoomed, bottom: 12, height: 24, textStyle: { color: colour("quiet") }, borderColor: colour("line") },
  ];
  // Not to be seen: it is what makes dragging select a part to zoom to.
  option.toolbox = { itemSize: 0, showTitle: false, feature: { dataZoom: { ...zoomed, yAxisIndex: "none" } } };
  option.legend.data = names;
  option.series = runs.flatMap((run, index) => {
    const name = names[index];
    const pairs = several ? [["loss", "smoothed", 0], ["difference", "smoothed_difference", 1]] : [["loss", "smoothed", 0]];
    return pairs.flatMap(([raw, smoothed, panel]) => [
      lossCurve(run[raw], { name, index, panel, width: 1, opacity: 0.35, dashed: false }),
      { ...lossCurve(run[smoothed], { name, index, panel, width: 2, opacity: 1, dashed: run.equals !== null }), markLine: gapMarks(run, index) },
    ]);
  });
  return option;
}

function lossCurve(values, { name, index, panel, width, opacity, dashed }) {
  const drawn = (at) => typeof values[at] === "number";
  const points = data.loss.steps.map((step, at) => {
    const value = [step, drawn(at) ? values[at] : null];
    const alone = drawn(at) && !drawn(at - 1) && !drawn(at + 1); // no line would show it
    return { value, symbol: alone ? "circle" : "none", symbolSize: 4 };
  });
  return {
    name, type: "line", data: points, xAxisIndex: panel, yAxisIndex: panel,
    silent: true, showAllSymbol: true,
    itemStyle: { color: runColour(index) },
    lineStyle: { width, opacity, type: dashed ? [8, 8] : "solid" },
  };
}

function gapMarks(run, index) {
  const ends = [...new Set(run.gaps.flat())];
  return {
    silent: true, symbol: "none", animation: false,
    lineStyle: { color: runColour(index), type: "dashed" },
    label: { formatter: "NaN or Inf", color: colour("ink") },
    data: ends.map((step) => ({ xAxis: step })),
  };
}

function lossTip(step) {
  const at = data.loss.steps.indexOf(step);
  const several = data.loss.runs.length > 1;
  const rows = data.loss.runs.map((run, index) => ({
    colour: runColour(index),
    name: run.label,
    values: [digits(run.loss[at]), ...(several ? [signed(run.difference[at])] : [])],
  }));
  return tip(`step ${step}`, ["loss", ...(several ? ["difference"] : [])], rows);
}

function memoryOption() {
  const { labels, components, bytes, totals } = data.memory;
  const { option, axis } = base(([point]) => memoryTip(point.dataIndex));
  const largest = Math.max(1, ...totals);
  option.grid = { left: 150, right: 60, top: 40, bottom: 48 };
  option.xAxis = { ...axis("bytes per parameter, at the entry of step()"), type: "value", nameGap: 28 };
  option.yAxis = { ...axis(""), type: "category", data: labels.map((_, index) => index), inverse: true };
  option.yAxis.axisLabel = { color: colour("ink"), width: 130, overflow: "truncate", formatter: (index) => labels[index] };
  option.tooltip.axisPointer = { type: "shadow" };
  option.legend.data = components;
  const bar = { type: "bar", stack: "all", barMaxWidth: 48 };
  option.series = components.map((name, part) => ({
    ...bar, name,
    data: bytes.map((sizes) => (sizes ? sizes[part] : 0)),
    itemStyle: { color: partColour(part), borderColor: colour("page"), borderWidth: 1 },
  }));
  option.series.push({
    ...bar, name: "total", data: totals.map(() => 0),
    label: { show: true, position: "right", color: colour("ink"), formatter: ({ dataIndex: run }) => totals[run]?.toFixed(1) ?? "not recorded" },
  });
  option.xAxis.max = Math.ceil(1.1 * largest);
  return option;
}

function memoryTip(run) {
  const { labels, components, bytes, totals } = data.memory;
  if (bytes[run] === null) return tip(labels[run], [], []);
  const rows = components.map((name, part) => ({ colour: partColour(part), name, values: [bytes[run][part].toFixed(2)] }));
  rows.push({ colour: "transparent", name: "total", values: [totals[run].toFixed(2)] });
  return tip(labels[run], ["bytes"], rows);
}

function timeOption() {
  const { edges, runs } = data.time;
  const { option, axis } = base(([point]) => timeTip(point.dataIndex));
  option.grid = { left: 76, right: 24, top: 40, bottom: 56 };
  option.xAxis = { ...axis("milliseconds a step"), type: "category", data: edges.map((_, bin) => bin), nameGap: 30, splitLine: { show: false } };
  option.xAxis.axisLabel = { color: colour("quiet"), formatter: (bin) => milliseconds(edges[bin]) };
  option.yAxis = { ...axis("% of steps"), type: "value", nameGap: 44 };
  option.legend.data = runs.map((run) => run.label);
  option.series = runs.map((run, index) => ({
    name: run.label, type: "line", step: "middle", symbol: "none", data: run.shares,
    itemStyle: { color: runColourOf(run.label) },
    areaStyle: { opacity: 0.08 },
  }));
  return option;
}

const milliseconds = (value) => String(Number(Number(value).toPrecision(3)));
const runColourOf = (label) => runColour(data.loss.runs.findIndex((run) => run.label === label));

function timeTip(bin) {
  const { edges, runs } = data.time;
  const range = bin + 1 < edges.length ? `${milliseconds(edges[bin])} to ${milliseconds(edges[bin + 1])} ms` : `${milliseconds(edges[bin])} ms or more`;
  const rows = runs.map((run) => ({ colour: runColourOf(run.label), name: run.label, values: [`${run.shares[bin]} %`] }));
  return tip(range, ["steps"], rows);
}

// Left and right walk over a chart's points and say them, + and - zoom where there is zooming.
function answerKeys(place, chart, count, say) {
  let at = 0;
  const zoom = (factor) => {
    const range = chart.getOption().dataZoom?.[0];
    if (!range) return;
    const middle = (100 * at) / Math.max(1, count - 1), half = (factor * (range.end - range.start)) / 2;
    chart.dispatchAction({ type: "dataZoom", start: Math.max(0, middle - half), end: Math.min(100, middle + half) });
  };
  const walk = (by) => {
    at = Math.min(count - 1, Math.max(0, at + by));
    chart.dispatchAction({ type: "showTip", seriesIndex: 0, dataIndex: at });
    document.getElementById("spoken").textContent = [...say(at).querySelectorAll("th, td")].map((cell) => cell.textContent).join(" ");
  };
  const keys = { ArrowLeft: () => walk(-1), ArrowRight: () => walk(1), "+": () => zoom(0.5), "-": () => zoom(2), 0: () => showAll(chart) };
  place.addEventListener("keydown", (event) => {
    if (!keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  });
}

const showAll = (chart) => chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 });
const dragToZoom = (chart) => chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });

function start() {
  const drawings = [
    ["loss", lossOption, data.loss.steps.length, (at) => lossTip(data.loss.steps[at])],
    ["memory", memoryOption, data.memory.labels.length, memoryTip],
    ...(data.time ? [["time", timeOption, data.time.edges.length, timeTip]] : []),
  ].map(([id, option, count, say]) => {
    const place = document.getElementById(id);
    const chart = echarts.init(place);
    answerKeys(place, chart, count, say);
    new ResizeObserver(() => chart.resize()).observe(place);
    return { chart, option };
  });
  const draw = () => drawings.forEach(({ chart, option }) => chart.setOption(option()));
  draw();
  const [{ chart: loss }] = drawings;
  dragToZoom(loss);
  loss.getZr().on("dblclick", () => showAll(loss));
  document.getElementById("all-steps").addEventListener("click", () => showAll(loss));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", draw);
  document.getElementById("colours").addEventListener("click", () => {
    const { style } = document.documentElement;
    const isDark = style.colorScheme ? style.colorScheme === "dark" : dark.matches;
    style.colorScheme = isDark ? "light" : "dark";
    draw();
  });
}

start();
