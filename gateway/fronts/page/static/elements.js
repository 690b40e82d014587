// Makes elements, and changes them no more often than they are drawn. Text only ever becomes text: nothing here, or anywhere on the page, reads markup.

// Work that takes longer is followed by a pause of so many times what it took.
const LONG_MILLISECONDS = 12;
const PAUSE_SHARE = 3;
const SVG = "http://www.w3.org/2000/svg";

/** Finds the element with an id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Makes an HTML element with properties, attributes by `data-…`, `aria-…` and `role`, and children or texts. */
export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "role" || key.includes("-")) element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children);
  return element;
}

/**
 * Makes a function that has work done with the next frame, once however often it is called before.
 *
 * What takes long, its layout and painting counted, waits for some frames, so that the page can be used meanwhile.
 */
export function framed(work) {
  let isDue = false;
  let notBefore = 0;
  const draw = () => {
    const begun = performance.now();
    isDue = false;
    work();
    // Behind the frame.
    setTimeout(() => {
      const now = performance.now();
      notBefore = now - begun > LONG_MILLISECONDS ? now + PAUSE_SHARE * (now - begun) : 0;
    });
  };
  return () => {
    if (isDue) return;
    isDue = true;
    const delay = notBefore - performance.now();
    if (delay > 0) setTimeout(() => requestAnimationFrame(draw), delay);
    else requestAnimationFrame(draw);
  };
}

/** Makes an SVG element with attributes. */
export function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
