// A session's messages are a tree; the page shows one path through it.

/** The messages from the root to `leafId`; [] for null. */
export function pathTo(messages, leafId) {
  const byId = new Map(messages.map((m) => [m.id, m]));
  const path = [];
  for (let m = byId.get(leafId); m; m = byId.get(m.parent_id)) {
    path.push(m);
    byId.delete(m.id); // a circle ends here
  }
  return path.reverse();
}

/** The messages with the same parent and role, oldest first. */
export function siblings(messages, message) {
  return messages.filter((m) => m.parent_id === message.parent_id && m.role === message.role);
}

/** The newest leaf below `id`. */
export function newestLeaf(messages, id) {
  for (let at = id; ; ) {
    const child = messages.findLast((m) => m.parent_id === at);
    if (!child) return at;
    at = child.id;
  }
}

/** The leaf that a freshly opened session shows: the end of its newest message. */
export function lastLeaf(messages) {
  return messages.length ? messages[messages.length - 1].id : null;
}
