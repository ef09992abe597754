export PYTHONPATH=src PYTHONUNBUFFERED=1
timeout ${1:-200} python3 -m pytest -p no:cacheprovider -m gpu tests/parallel tests/devices tests/checkpoint tests/feed tests/comm --no-header --tb=short --timeout=25 --timeout-method=signal -v -rfE --maxfail=60 > $OUT/gpu.log 2>&1
tail -3 $OUT/gpu.log; grep -E "^(FAILED|ERROR)" $OUT/gpu.log | cut -c1-200 | head -60
