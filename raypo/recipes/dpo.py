"""Direct preference optimisation (DPO): a policy learns preferences without a reward model."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Any, ClassVar

from raypo.config import DPOConfig
from raypo.data.examples import LoadedExamples, load_pairs, load_verdicts
from raypo.data.item_store import ItemStore, Selection
from raypo.learner.preference_tasks import PreferenceTask, VerdictTask
from raypo.learner.supervised import SupervisedLearner
from raypo.models.loading import load_causal_lm
from raypo.models.lora import load_policy
from raypo.run.examples_run import PolicyExamplesRecipe, Reader
from raypo.run.reference import with_references


class DPORecipe(PolicyExamplesRecipe[DPOConfig, Any]):
    """DPO recipe: the policy learns from pairs, or from verdicts if the loss is kto."""

    held_out_key: ClassVar[str] = "pairs"

    @classmethod
    def reader(cls, config: DPOConfig) -> Reader[Any]:
        """Return the loader of pairs, or of verdicts for kto. It ignores `label_key`."""
        load: Reader[Any] = load_verdicts if config.dpo.loss == "kto" else load_pairs

        # Only `eval.function` reads labels, so preferences need none.
        def read(section: Any, *others: Any, **named: Any) -> LoadedExamples[Any]:
            return load(section.model_copy(update={"label_key": None}), *others, **named)

        return read

    def make_task(self) -> PreferenceTask | VerdictTask:
        """Load the policy, which learns the preferences."""
        model = load_policy(self.run.config.model)
        kind = VerdictTask if self.run.config.dpo.loss == "kto" else PreferenceTask
        return kind(model, self.run.config.dpo)

    def before_restoring(self, learner: SupervisedLearner[Any]) -> None:
        """Add the reference model's log-probs to each preference, unless the data has them.

        Without `model.reference` the learner's initial policy is the reference model, so this runs
        before a checkpoint is restored.
        """
        config = self.run.config
        if not config.dpo.needs_reference or config.data.ref_chosen_key:
            return
        self.run.tell.phase("computing the reference's log-probs")
        items = self.stream.items
        drawn = list(range(len(items)))
        goes_on = config.from_checkpoint or self.run.runtime.resume_from
        # A restored data cursor may be anywhere, so a resumed run needs all items. A new run needs
        # only the items that it will draw.
        if goes_on is None:
            draws = self.stream.of(drawn).take(config.num_steps * config.learner.batch_size)
            drawn = list(dict.fromkeys(place for _, place in draws))
        section, named = config.model, config.model.reference
        other = None
        if named is not None:
            other = load_causal_lm(named, dtype=section.dtype, attention=section.attention)
        asked = with_references(
            ItemStore(chain(Selection(items, drawn), self.held_out)),
            learner,
            other=other,
            name=f"{named or section.policy} {section.dtype}",
            files=self.run.files,
            workers=self.run.workers,
        )
        # Items that are not drawn keep the number len(asked), which is out of range.
        numbers = array("q", [len(asked)]) * len(items)
        for number, place in enumerate(drawn):
            numbers[place] = number
        self.stream = self.stream.of(Selection(asked, numbers))
        self.held_out = asked[len(drawn) :]
