package kwok

import (
	"encoding/binary"
	"hash/fnv"
	"math/rand/v2"
	"time"
)

// chance decides everything random about a machine from the seed, the machine's id and the question, so that a decision
// is the same however often, in whichever order, and after whichever restart it is asked for.
type chance struct{ seed int64 }

func (c chance) of(id, question string) float64 {
	h := fnv.New64a()
	_ = binary.Write(h, binary.LittleEndian, c.seed)
	_, _ = h.Write([]byte(id + "\x00" + question))
	return rand.New(rand.NewPCG(h.Sum64(), uint64(c.seed))).Float64()
}

// happens is true with probability p.
func (c chance) happens(p float64, id, question string) bool { return p > 0 && c.of(id, question) < p }

// latency multiplies base by a factor between 1 and 1+jitter.
func (c chance) latency(base time.Duration, jitter float64, id, question string) time.Duration {
	return time.Duration(float64(base) * (1 + jitter*c.of(id, question)))
}
