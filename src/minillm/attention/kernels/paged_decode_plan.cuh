// The division of decode attention into items: what paged_decode_plan.cu writes and paged_decode.cu reads.
#pragma once

constexpr int kMinItemShift = 6;  // the smallest item has 64 tokens

// Plan in device memory: int4 {number of entries, log2(S), window, 0}, then per entry {sequence, first token, sequence
// length, slot of the sequence's first entry or -1 if it has only one}. An entry is one item for each KV head (and
// group of 8 query heads); slots count entries of sequences with several, those that need the workspace.
struct Span {
    int begin, end;  // items of a sequence: indexes of the first and behind the last
};

__device__ __forceinline__ Span item_span(int len, int window, int shift) {
    const int from = window > 0 ? max(0, len - window) : 0;
    return {from >> shift, max((len + (1 << shift) - 1) >> shift, 1)};
}
