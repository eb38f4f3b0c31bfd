// State that the page's parts share.

export const state = {
  run: null, // the newest answer to /run
  trouble: false, // something is late or lost, as the banner says
  tab: "learning",
  failures: 0, // refreshes in a row that no controller answered
  drawnStep: -1, // newest step on the curves; -1 makes the next refresh draw them anew
};
