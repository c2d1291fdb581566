/* An attention kernel of another project: contiguous float32 (B, S, H, D), full attention. It knows nothing of torch. */

#include <math.h>
#include <stdlib.h>
void attend(const float* q, const float* k, const float* v, float* out, long B, long S, long H, long D, float scale) {
  float* p = malloc(sizeof(float) * S);
  for (long b = 0; b < B; ++b) for (long h = 0; h < H; ++h) for (long i = 0; i < S; ++i) {
    const float* row = q + ((b * S + i) * H + h) * D;
    float* to = out + ((b * S + i) * H + h) * D;
    float most = -INFINITY, sum = 0;
    for (long j = 0; j < S; ++j) {
      const float* key = k + ((b * S + j) * H + h) * D;
      float dot = 0;
      for (long d = 0; d < D; ++d) dot += row[d] * key[d];
      p[j] = scale * dot;
      if (p[j] > most) most = p[j];
    }
    for (long d = 0; d < D; ++d) to[d] = 0;
    for (long j = 0; j < S; ++j) {
      const float* value = v + ((b * S + j) * H + h) * D;
      float weight = expf(p[j] - most);
      sum += weight;
      for (long d = 0; d < D; ++d) to[d] += weight * value[d];
    }
    for (long d = 0; d < D; ++d) to[d] /= sum;
  }
  free(p);
}
