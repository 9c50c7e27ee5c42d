// What a cell of a map means and how it is drawn. One byte: the lowest three bits are the state,
// the upper five how many of its blocks are in it, in 31sts.

export const STATES = [
  { name: "clean", sign: "", meaning: "free, without content" },
  { name: "cached", sign: "dot", meaning: "free, content kept for reuse" },
  { name: "referenced", sign: "full", meaning: "in use by one request" },
  { name: "shared", sign: "twin", meaning: "in use by several requests" },
  { name: "fenced", sign: "cross", meaning: "given back, still touched by a step or copy" },
  { name: "host", sign: "bar", meaning: "kept on the host tier" },
];

const LEVELS = 31;
const SIGN_FROM = 8; // smaller cells have no room for a sign: the table and the readout tell

export const stateOf = (cell) => cell & 7;
export const levelOf = (cell) => cell >> 3;

export function decodeCells(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** First and last block of a cell. */
export function blocksOf(index, numCells, numBlocks) {
  const first = Math.floor((index * numBlocks) / numCells);
  const next = Math.floor(((index + 1) * numBlocks) / numCells);
  return [first, next - 1];
}

/** How cells are laid out in a box: as large as they fit, within limits. */
export function layout(numCells, width, height) {
  let size = Math.floor(Math.sqrt((width * height) / Math.max(numCells, 1)));
  size = Math.max(3, Math.min(18, size));
  while (size > 3 && Math.ceil(numCells / Math.floor(width / size)) * size > height) size -= 1;
  const columns = Math.max(1, Math.floor(width / size));
  return { size, columns, rows: Math.max(1, Math.ceil(numCells / columns)) };
}

/** Colours of the theme now. */
export function palette(shade) {
  return {
    fills: STATES.map((state) => shade(state.name)),
    edge: shade("clean-edge"),
    clean: shade("clean"),
    light: shade("sign"),
    dark: shade("sign-dark"),
    focus: shade("focus"),
  };
}

/** One cell at (x, y); `lone`: the state shown alone, or null. */
export function drawCell(context, cell, x, y, size, colours, lone) {
  const state = stateOf(cell);
  const inner = size > 4 ? size - 1 : size - 0.5;
  const isDim = lone !== null && lone !== state;
  context.globalAlpha = 1;
  context.fillStyle = colours.clean;
  context.fillRect(x, y, inner, inner);
  if (state !== 0 && !isDim) {
    context.globalAlpha = 0.4 + (0.6 * levelOf(cell)) / LEVELS;
    context.fillStyle = colours.fills[state];
    context.fillRect(x, y, inner, inner);
    context.globalAlpha = 1;
    if (inner >= SIGN_FROM - 1) drawSign(context, STATES[state].sign, x, y, inner, colours);
  } else if (state === 0 && inner >= SIGN_FROM - 1) {
    context.strokeStyle = colours.edge;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
  }
  context.globalAlpha = 1;
}

function drawSign(context, sign, x, y, size, colours) {
  const middle = size / 2;
  context.fillStyle = context.strokeStyle = sign === "dot" ? colours.dark : colours.light;
  context.lineWidth = Math.max(1, size / 9);
  context.beginPath();
  if (sign === "dot") {
    context.arc(x + middle, y + middle, Math.max(1, size / 7), 0, 2 * Math.PI);
    context.fill();
  } else if (sign === "twin") {
    const width = Math.max(1, size / 7);
    context.fillRect(x + size * 0.3 - width / 2, y + size * 0.24, width, size * 0.52);
    context.fillRect(x + size * 0.7 - width / 2, y + size * 0.24, width, size * 0.52);
  } else if (sign === "cross") {
    const [near, far] = [size * 0.26, size * 0.74];
    context.moveTo(x + near, y + near);
    context.lineTo(x + far, y + far);
    context.moveTo(x + far, y + near);
    context.lineTo(x + near, y + far);
    context.stroke();
  } else if (sign === "bar") {
    const width = Math.max(1, size / 7);
    context.fillRect(x + size * 0.22, y + middle - width / 2, size * 0.56, width);
  }
}

/** Runs of equal cells as {first, last, state, level}, for the table. */
export function runs(cells, numBlocks) {
  const found = [];
  for (let index = 0; index < cells.length; index += 1) {
    const [first, last] = blocksOf(index, cells.length, numBlocks);
    const before = found.at(-1);
    if (before && before.cell === cells[index]) before.last = last;
    else found.push({ cell: cells[index], first, last, state: stateOf(cells[index]), level: levelOf(cells[index]) });
  }
  return found;
}

export const share = (level) => (level >= LEVELS ? "all" : `${Math.round((100 * level) / LEVELS)} %`);
