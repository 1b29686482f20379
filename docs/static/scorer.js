// Scores of the site's search: those of Sphinx, but of pages that hold the words of a question a recipe comes first.
"use strict";

var Scorer = {
  score: ([page, _title, _anchor, _description, score, _file, kind]) =>
    /^(text|title)$/.test(kind) && page.startsWith("howto/") && page !== "howto/index" ? score + 4 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
