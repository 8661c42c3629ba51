# Soups of ERM and LP-FT, and WiSE-FT of ERM: docs/results/fashion_shift.md
for model in dense top_2; do
  for run in test{0,1,3}-trial{0..4}; do
    timm-moe-dg average output/fashion_shift/folder-${model}_{ERM,LP_FT}-$run-hparams0 \
      --output output/fashion_soups/$model-soup-$run
    timm-moe-dg average output/fashion_shift/folder-${model}_ERM-$run-hparams0 \
      --method wise_ft --alpha 0 0.5 --output output/fashion_wise/$model-wise_ft-$run
  done
done
