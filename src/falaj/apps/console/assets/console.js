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

document.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const card = step && event.target.closest?.(".search-card");
  if (!card) return;
  event.preventDefault();
  const stops = [card.querySelector("input"), ...card.querySelectorAll(".hit")];
  stops[Math.min(Math.max(stops.indexOf(document.activeElement) + step, 0), stops.length - 1)].focus();
});

const REDRAWN_MS = 2000;
let lastFocus = null; // outside of dialogs and menus: it gets the focus back when they go, or when its part is drawn again
let place = null; // where it stands among controls of the same words

function alike({ tag, words, action }) {
  const isAlike = (each) => wordsOf(each) === words && each.dataset.action === action;
  return [...document.querySelectorAll(`main ${tag}`)].filter(isAlike);
}

function wordsOf(element) {
  return element.getAttribute("aria-label") ?? element.textContent;
}

function returnFocus() {
  if (!lastFocus || document.activeElement !== document.body) return;
  const again = lastFocus.isConnected ? lastFocus : alike(place)[place.index];
  if (again) again.focus({ preventScroll: true });
  else if (Date.now() > (place.until ??= Date.now() + REDRAWN_MS)) lastFocus = null; // it is gone for good
}

document.addEventListener("focusin", ({ target }) => {
  if (target.closest("[id^=q-portal]")) return;
  lastFocus = target;
  place = { tag: target.localName, words: wordsOf(target), action: target.dataset.action };
  place.index = alike(place).indexOf(target);
});
document.addEventListener("pointerdown", ({ target }) => {
  if (!target.closest("a, button, input, select, textarea, [tabindex]:not(main)")) lastFocus = null;
});
new MutationObserver((changes) => {
  const gone = changes.flatMap((each) => [...each.removedNodes]).some((node) => /^q-portal--(dialog|menu)/.test(node.id));
  if (gone) returnFocus();
}).observe(document.body, { childList: true });
new MutationObserver(() => {
  if (lastFocus && !lastFocus.isConnected) returnFocus();
}).observe(document.body, { childList: true, subtree: true });

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
