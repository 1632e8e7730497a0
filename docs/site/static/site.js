"use strict";
// The theme's arrows in the navigation have no name that a screen reader could say.
addEventListener("DOMContentLoaded", () => {
  for (const arrow of document.querySelectorAll(".bd-links summary"))
    arrow.setAttribute("aria-label", `Pages below ${arrow.closest("li").querySelector("a").textContent}`);
});
