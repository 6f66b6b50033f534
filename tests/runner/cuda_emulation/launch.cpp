// The launches of runner/cuda_sampling.py, for a test to call.
#include "sampling.cu"

extern "C" {

void sample_rows(const Call* call, int splits, int rows, bool random, bool filtered) {
    run_grid(splits, rows, kThreads, [&] { sample_best<float>(*call); });
    if (random) run_grid(splits, rows, kThreads, [&] { sample_mass<float>(*call); });
    if (filtered) {
        run_grid(splits, rows, kThreads, [&] { sample_cut<float>(*call); });
        run_grid(rows, 1, kSearchThreads, [&] { sample_search<float>(*call, splits); });
    }
}

double uniform_number(u64 seed, u32 choice, u32 index) { return philox_uniform(seed, choice, index); }

void weights(const float* logits, u64* out, int count, float max, float temperature, float min_p) {
    Row row{};
    row.max = max, row.temperature = temperature, row.reciprocal = __frcp_rn(temperature), row.min_p = min_p;
    for (int i = 0; i < count; ++i) out[i] = Weigher(row)(logits[i]);
}
}
