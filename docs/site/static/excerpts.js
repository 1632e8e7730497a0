"use strict";
// Excerpts of what a search found. Sphinx fetches the pages for them, which a browser refuses in a folder. So their texts
// are a script, page_texts.js, which is loaded when a result first appears.
(() => {
  const here = document.currentScript.src;
  let texts;
  const loaded = () => (texts ??= new Promise((resolve) => {
    const script = document.createElement("script");
    script.onload = () => resolve(window.PAGE_TEXTS);
    script.src = new URL("page_texts.js", here);
    document.head.append(script);
  }));
  async function excerpt(item) {
    const link = item.querySelector("a");
    if (!link || item.querySelector("span, .excerpt")) return;  // a function has its description
    const root = new URL(document.documentElement.dataset.content_root, location.href);
    const name = new URL(link.href).pathname.slice(root.pathname.length).replace(/\.html$/, "");
    const text = (await loaded())[decodeURIComponent(name)];
    const words = (new URLSearchParams(location.search).get("q") ?? document.querySelector("dialog[open] input")?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    if (!text || item.querySelector(".excerpt")) return;
    const found = words.map((word) => text.toLowerCase().indexOf(word)).filter((place) => place >= 0);
    const first = found.length ? Math.min(...found) : 0, at = first > 100 ? text.indexOf(" ", first - 100) + 1 : 0;
    const shown = document.createElement("span");
    shown.className = "excerpt context";
    shown.textContent = `${at ? "… " : ""}${text.slice(at, text.lastIndexOf(" ", at + 240))} …`;
    item.append(shown);
    for (const word of words) window._highlightText?.(shown, word, "highlighted");
  }
  new MutationObserver((changes) => {
    for (const change of changes) for (const node of change.addedNodes) if (node.matches?.("ul.search li")) excerpt(node);
  }).observe(document.documentElement, { childList: true, subtree: true });
})();
