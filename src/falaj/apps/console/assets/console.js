// Keys, the theme, and leaving: what a page does without the server.
"use strict";

const YEAR_S = 31536000;

function keep(name, value) {
  const secure = location.protocol === "https:" ? "; Secure" : "";
  document.cookie = `${name}=${value}; Path=/; Max-Age=${YEAR_S}; SameSite=Strict${secure}`;
}

const dark = matchMedia("(prefers-color-scheme: dark)");

function keepScheme() {
  keep("falaj_scheme", dark.matches ? "dark" : "light");
}

window.falajTheme = (name) => {
  keep("falaj_theme", name);
  location.reload();
};

let leaving = false;

window.falajSignOut = async () => {
  leaving = true;
  await fetch("/signout", { method: "POST", redirect: "manual" });
  location.replace("/signin");
};

window.falajSignedOut = () => {
  if (!leaving) location.replace(`/signin?next=${encodeURIComponent(location.pathname + location.search)}`);
};

keepScheme();
dark.addEventListener("change", () => {
  keepScheme();
  if (!/falaj_theme=(light|dark)/.test(document.cookie)) location.reload();
});

document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    document.getElementById("search-button")?.click();
  }
});

function tellVisibility() {
  if (window.did_handshake) window.emitEvent("visibility", document.visibilityState);
  else setTimeout(tellVisibility, 200);
}

document.addEventListener("visibilitychange", tellVisibility);
if (document.hidden) tellVisibility();

let shown = location.pathname + location.search;
const push = history.pushState.bind(history);
history.pushState = (...given) => {
  push(...given);
  shown = location.pathname + location.search;
};
window.addEventListener("popstate", () => {
  if (location.pathname + location.search !== shown) location.reload();
});

if (location.hash.startsWith("#code=")) location.replace(`/signin${location.hash}`);
