// Dialog for painting a mask: the painted area becomes white, the rest black.
import { $ } from "./dom.js";
import { addFiles, listChosen } from "./inputs.js";

const PAINT = "rgb(0 160 140)";
let last = null; // the previous point of the stroke

export function openMask() {
  const [image] = listChosen("image");
  if (!image) return;
  const canvas = $("mask-canvas");
  [canvas.width, canvas.height] = [image.width, image.height];
  $("mask-image").src = image.url;
  $("mask-image").style.width = `min(80vw, 560px, ${(62 * image.width) / image.height}dvh)`;
  $("mask-brush").value = 10;
  $("mask").showModal();
}

function findPoint(event) {
  const canvas = $("mask-canvas"), box = canvas.getBoundingClientRect();
  return [((event.clientX - box.left) * canvas.width) / box.width, ((event.clientY - box.top) * canvas.height) / box.height];
}

function paint(event) {
  const canvas = $("mask-canvas"), context = canvas.getContext("2d"), point = findPoint(event);
  context.lineWidth = (Math.max(canvas.width, canvas.height) * Number($("mask-brush").value)) / 100;
  context.lineCap = context.lineJoin = "round";
  context.strokeStyle = PAINT;
  context.beginPath();
  context.moveTo(...(last ?? point));
  context.lineTo(...point);
  context.stroke();
  last = point;
}

// Return the mask as an image: white where something is painted.
function exportMask() {
  const painted = $("mask-canvas"), canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [painted.width, painted.height];
  const context = canvas.getContext("2d");
  context.drawImage(painted, 0, 0);
  context.globalCompositeOperation = "source-in";
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.globalCompositeOperation = "destination-over";
  context.fillStyle = "black";
  context.fillRect(0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

export function addMaskListeners() {
  const canvas = $("mask-canvas");
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    paint(event);
  });
  canvas.addEventListener("pointermove", (event) => event.buttons && last && paint(event));
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (last = null));
  $("mask-clear").addEventListener("click", () => canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height));
  $("mask-close").addEventListener("click", () => $("mask").close());
  $("mask-use").addEventListener("click", async () => {
    const blob = await exportMask();
    $("mask").close();
    await addFiles("mask_image", [new File([blob], "painted mask", { type: "image/png" })]);
  });
}
