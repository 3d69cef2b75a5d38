"use strict";
// Unpacks plotly.js, then draws the figures of the page in its colours, again whenever light and dark change.
(async () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const hover = window.matchMedia("(hover: hover)");
  const narrow = window.matchMedia("(max-width: 860px)");

  // Sequential: viridis, the same way round on both backgrounds. Diverging: the middle is a grey that differs from an
  // empty cell (the card's colour) on both.
  const scales = {
    "@sequential": "Viridis",
    "@diverging": () =>
      dark.matches
        ? [[0, "#5aa9ff"], [0.25, "#3a6ea8"], [0.5, "#4a4f58"], [0.75, "#b5651d"], [1, "#ffb14a"]]
        : [[0, "#1f5fa8"], [0.25, "#86b2dc"], [0.5, "#dcdfe3"], [0.75, "#eea868"], [1, "#b04a08"]],
  };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function themed(value) {
    if (typeof value === "string" && value.startsWith("@")) {
      if (value === "@text") return colour("text");
      const scale = scales[value];
      return typeof scale === "function" ? scale() : scale === undefined ? value : scale;
    }
    if (Array.isArray(value)) return typeof value[0] === "object" && value[0] !== null ? value.map(themed) : value;
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v)]));
    }
    return value;
  }

  function layout(figure) {
    const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
    const own = themed(figure.layout);
    const steps = figure.data.flatMap((t) => (own.hovermode === "x unified" || t.type === "heatmap" ? [t.x[0], t.x[t.x.length - 1]] : []));
    const whole = Math.max(...steps) - Math.min(...steps) <= 8 && !own.xaxis.tickvals ? { dtick: 1 } : {};
    const heat = figure.data.some((t) => t.type === "heatmap");
    return {
      ...own,
      font: { family: "system-ui, sans-serif", size: 12, color: colour("text") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 50, r: heat ? 16 : 14, t: 12, b: 40 },
      showlegend: !heat && figure.data.filter((t) => t.showlegend !== false).length > 1,
      modebar: { bgcolor: colour("card"), color: colour("soft"), activecolor: colour("accent") },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: narrow.matches ? 11 : 12 } },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") }, namelength: -1 },
      xaxis: { ...axis, ...whole, ...own.xaxis, showgrid: !heat },
      yaxis: { ...axis, ...own.yaxis, showgrid: !heat },
    };
  }

  // Beside the plot a colour bar takes a third of a phone's width; above it, none.
  function flatColourBar(trace) {
    if (trace.type !== "heatmap") return trace;
    const bar = { orientation: "h", x: 0.5, y: 1.02, yanchor: "bottom", thickness: 10 };
    return { ...trace, colorbar: { ...trace.colorbar, ...bar, title: { ...trace.colorbar.title, side: "top" } } };
  }

  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "sendDataToCloud"] };

  function draw() {
    for (const figure of figures) {
      const data = narrow.matches ? themed(figure.data).map(flatColourBar) : themed(figure.data);
      Plotly.react(figure.id, data, layout(figure), { ...config, displayModeBar: hover.matches ? "hover" : false });
    }
    document.documentElement.dataset.drawn = String(figures.length);
  }

  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const library = document.createElement("script");
    library.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(library);
  }

  await unpack();
  draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
})();
