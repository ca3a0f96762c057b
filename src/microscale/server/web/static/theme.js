// Runs before anything is drawn, so that no wrong colours flash. Not a module for that reason.
"use strict";
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("microscale.theme");
  } catch {
    // Storage may be forbidden; the system's choice will do.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
