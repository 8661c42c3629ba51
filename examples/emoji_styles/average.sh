# Soups of three continuations of one half-trained network, at different rates: docs/results/emoji_styles.md
for model in dense top_2; do
  for run in test{0..4}-trial{0..4}; do
    timm-moe-dg average output/emoji_styles/emoji_styles-${model}_upcycled-$run-hparams0 \
      output/emoji_soups/emoji_styles-${model}_{slow,fast}-$run-hparams0 \
      --output output/emoji_styles/emoji_styles-$model-soup-$run
  done
done
