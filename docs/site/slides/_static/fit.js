"use strict";
// Pictures with sliders are as large as their slide has room for: the first of these sizes at which nothing scrolls.
(() => {
  const SIZES = [1.6, 1.5, 1.4, 1.3, 1.2, 1.1, 1.05, 1, 0.95, 0.9, 0.85];
  const holds = (part) => part.scrollHeight <= part.clientHeight + 1 && part.scrollWidth <= part.clientWidth + 1;

  function fit() {
    const slide = Reveal.getCurrentSlide(), picture = slide && slide.querySelector(".sliders");
    if (!picture) return;
    for (const size of SIZES) {
      picture.style.zoom = size;
      if ([slide, ...picture.querySelectorAll(".sliders-scroll")].every(holds)) return;
    }
  }

  window.addEventListener("load", () => {
    const start = () => { Reveal.on("slidechanged", fit); fit(); };
    if (Reveal.isReady()) start(); else Reveal.on("ready", start);
  });
})();
