// Makes elements, and changes them no more often than they are drawn. Text only ever becomes text: nothing here, or anywhere on the page, reads markup.

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

/** Makes a function that has work done with the next frame, once however often it is called before. */
export function framed(work) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      work();
    });
  };
}

/** Makes an SVG element with attributes. */
export function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
