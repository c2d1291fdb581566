/* Someone else's attention, as its users meet it: a C library that knows addresses and sizes, nothing of torch.
   Arrays are contiguous float32 (B, S, H, D), keys and values of as many heads as queries; lse is (B, H, Sq).
   Each row is computed as the formula says; queries are the last ones of the keys under `causal`. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
  int64_t batch, heads, q_len, k_len, dim;
} Sizes;

static int64_t at(const Sizes* n, int64_t b, int64_t row, int64_t length, int64_t h) {
  return ((b * length + row) * n->heads + h) * n->dim;
}

static int64_t visible(const Sizes* n, int64_t row, int causal) {
  const int64_t keys = causal ? n->k_len - n->q_len + row + 1 : n->k_len;
  return keys > 0 ? keys : 0;
}

static double dot(const float* a, const float* b, int64_t dim) {
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += (double)a[d] * b[d];
  return sum;
}

/* Softmax weights of one row; returns the logarithm of their sum before the division by it. */
static double weigh(const Sizes* n, const float* q, const float* k, int64_t b, int64_t h, int64_t keys, float scale,
                    double* p) {
  double most = -INFINITY, sum = 0;
  for (int64_t j = 0; j < keys; ++j) {
    p[j] = scale * dot(q, k + at(n, b, j, n->k_len, h), n->dim);
    if (p[j] > most) most = p[j];
  }
  for (int64_t j = 0; j < keys; ++j) sum += p[j] = exp(p[j] - most);
  for (int64_t j = 0; j < keys; ++j) p[j] /= sum;
  return keys ? most + log(sum) : -INFINITY;
}

static int64_t calls = 0;

int64_t foreign_calls(void) { return calls; }

int foreign_forward(const float* q, const float* k, const float* v, float* out, float* lse, int64_t batch, int64_t heads,
                    int64_t q_len, int64_t k_len, int64_t dim, float scale, int causal) {
  const Sizes n = {batch, heads, q_len, k_len, dim};
  double* p = malloc(sizeof(double) * (size_t)(k_len + dim + 1));
  if (!p) return 1;
  double* sum = p + k_len;
  ++calls;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < q_len; ++i) {
        const int64_t keys = visible(&n, i, causal), row = at(&n, b, i, q_len, h);
        lse[(b * heads + h) * q_len + i] = (float)weigh(&n, q + row, k, b, h, keys, scale, p);
        for (int64_t d = 0; d < dim; ++d) sum[d] = 0;
        for (int64_t j = 0; j < keys; ++j)
          for (int64_t d = 0; d < dim; ++d) sum[d] += p[j] * v[at(&n, b, j, k_len, h) + d];
        for (int64_t d = 0; d < dim; ++d) out[row + d] = (float)sum[d];
      }
  free(p);
  return 0;
}

/* dlse may be null. The gradients of k and v are accumulated in double and rounded once. */
int foreign_backward(const float* dout, const float* dlse, const float* q, const float* k, const float* v, float* dq,
                     float* dk, float* dv, int64_t batch, int64_t heads, int64_t q_len, int64_t k_len, int64_t dim,
                     float scale, int causal) {
  const Sizes n = {batch, heads, q_len, k_len, dim};
  const size_t size = (size_t)(batch * k_len * heads * dim);
  double* sums = calloc(2 * size + (size_t)(2 * k_len + dim + 1), sizeof(double));
  if (!sums) return 1;
  double *sum_k = sums, *sum_v = sums + size, *p = sums + 2 * size, *dp = p + k_len, *sum_q = dp + k_len;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < q_len; ++i) {
        const int64_t keys = visible(&n, i, causal), row = at(&n, b, i, q_len, h);
        double mean = 0;
        weigh(&n, q + row, k, b, h, keys, scale, p);
        for (int64_t j = 0; j < keys; ++j) {
          dp[j] = dot(dout + row, v + at(&n, b, j, k_len, h), dim);
          mean += p[j] * dp[j];
        }
        if (dlse) mean -= dlse[(b * heads + h) * q_len + i];
        for (int64_t d = 0; d < dim; ++d) sum_q[d] = 0;
        for (int64_t j = 0; j < keys; ++j) {
          const int64_t key = at(&n, b, j, k_len, h);
          const double dx = scale * p[j] * (dp[j] - mean);
          for (int64_t d = 0; d < dim; ++d) {
            sum_q[d] += dx * k[key + d];
            sum_k[key + d] += dx * q[row + d];
            sum_v[key + d] += p[j] * dout[row + d];
          }
        }
        for (int64_t d = 0; d < dim; ++d) dq[row + d] = (float)sum_q[d];
      }
  for (size_t i = 0; i < size; ++i) {
    dk[i] = (float)sum_k[i];
    dv[i] = (float)sum_v[i];
  }
  free(sums);
  return 0;
}
