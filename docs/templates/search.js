/* Search over sections of the guides and names of the API. build.py puts the index in place of the next line's null. */
const INDEX = null;

(() => {
  const input = document.getElementById("search"), main = document.querySelector("main");
  const root = input.dataset.root, original = [...main.childNodes];
  const MOST = 30, AROUND = 70;

  /** Every word must occur; in a title it counts most, then in the name of a page, then in the text. */
  function score(entry, words) {
    const title = entry.title.toLowerCase(), page = entry.page.toLowerCase(), text = entry.text.toLowerCase();
    let sum = 0;
    for (const word of words) {
      const found = (title === word ? 40 : 0) + (title.includes(word) ? 20 : 0) + (page.includes(word) ? 5 : 0) +
        (text.includes(word) ? 1 + Math.min(text.split(word).length - 1, 4) : 0);
      if (!found) return 0;
      sum += found;
    }
    return sum;
  }

  function element(tag, text, around) {
    const made = document.createElement(tag);
    made.textContent = text;
    if (around) around.append(made);
    return made;
  }

  function excerpt(entry, words) {
    const at = Math.max(0, Math.min(...words.map(w => entry.text.toLowerCase().indexOf(w)).filter(i => i >= 0), 1e9));
    const start = at === 1e9 ? 0 : Math.max(0, at - AROUND);
    return (start ? "..." : "") + entry.text.slice(start, start + 3 * AROUND) + "...";
  }

  function show(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return main.replaceChildren(...original);
    const found = INDEX.map(entry => [score(entry, words), entry]).filter(pair => pair[0]);
    found.sort((a, b) => b[0] - a[0]);
    const box = document.createElement("section");
    box.className = "results";
    element("h1", found.length ? `${found.length} results for "${query}"` : `Nothing has "${query}"`, box);
    for (const [, entry] of found.slice(0, MOST)) {
      const item = document.createElement("article");
      const link = element("a", entry.title, item);
      link.href = root + entry.url;
      link.addEventListener("click", () => { input.value = ""; main.replaceChildren(...original); });
      element("span", entry.page, item);
      element("p", excerpt(entry, words), item);
      box.append(item);
    }
    main.replaceChildren(box);
    window.scrollTo(0, 0);
  }

  input.addEventListener("input", () => show(input.value.trim()));
  document.addEventListener("keydown", event => {
    if (event.key === "/" && document.activeElement !== input) { event.preventDefault(); input.focus(); }
  });
  const asked = new URLSearchParams(location.search).get("q");
  if (asked) { input.value = asked; show(asked); }
})();
