package capacity

import (
	"encoding/binary"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// shape is what nodes of one kind are to the pods of one cluster.
type shape struct {
	key    string
	labels map[string]string
	taints []corev1.Taint
	// capacity is before and room after DaemonSets.
	capacity, room vector
	accepts        []int8 // by demand.index: 0 unknown, 1 yes, -1 no
}

// shapeOf finds or makes the shape of nodes with these taints, resources and labels, of which later layers override earlier
// ones. Thousands of machines share few shapes, so that the search has to be cheap and the making need not be.
func (p *planner) shapeOf(s *site, taints []corev1.Taint, capacity vector, layers ...map[string]string) *shape {
	b := s.scratch[:0]
	for _, key := range s.keys {
		for i := len(layers) - 1; i >= 0; i-- {
			if v, ok := layers[i][key]; ok {
				b = append(append(b, v...), 1)
				break
			}
		}
		b = append(b, 0)
	}
	for i := range taints {
		t := &taints[i]
		b = append(append(append(b, t.Key...), 1), t.Value...)
		b = append(append(append(b, 1), t.Effect...), 0)
	}
	for _, v := range capacity {
		b = binary.AppendVarint(b, v)
	}
	s.scratch = b
	if sh := s.shapes[string(b)]; sh != nil {
		return sh
	}
	key, labels := string(b), merge(layers...)
	sh := &shape{
		key: key, labels: labels, taints: taints, capacity: capacity, room: slices.Clone(capacity),
		accepts: make([]int8, len(s.demands)),
	}
	for i := range s.in.Daemons {
		if daemon := &s.in.Daemons[i]; daemon.RunsOn(labels, taints) {
			for j, v := range p.space.request(daemon.Resources) {
				// Bounded, so that no amount that anybody names can wrap around to plenty.
				sh.room[j] = max(sh.room[j]-min(v, unlimited), -unlimited)
			}
		}
	}
	s.shapes[key] = sh
	return sh
}

func (p *planner) shapeOfSlot(s *site, i int) *shape {
	if s.slotShape[i] == nil {
		sl := p.slots[i]
		s.slotShape[i] = p.shapeOf(s, sl.offering.Taints, sl.capacity, sl.labels)
	}
	return s.slotShape[i]
}

// acceptsPods reports whether pods of d may stand on nodes of the shape at all: labels, taints, and the topology keys that its
// rules speak of.
func (sh *shape) acceptsPods(d *demand) bool {
	if sh.accepts[d.index] == 0 {
		sh.accepts[d.index] = -1
		if d.Profile.MatchesLabels(sh.labels) && Tolerates(d.Profile.Tolerations, sh.taints) && sh.hasKeys(d) {
			sh.accepts[d.index] = 1
		}
	}
	return sh.accepts[d.index] > 0
}

func (sh *shape) hasKeys(d *demand) bool {
	for _, spread := range d.hard {
		if _, ok := sh.labels[spread.TopologyKey]; !ok {
			return false
		}
	}
	for _, r := range d.unit.same {
		v, ok := sh.labels[r.Key]
		if !ok || len(r.Values) > 0 && !slices.Contains(r.Values, v) {
			return false
		}
	}
	return true
}

// together is the shape's value of the keys that the unit has to share; empty where there are none.
func (sh *shape) together(u *unit) string {
	switch len(u.same) {
	case 0:
		return ""
	case 1:
		return sh.labels[u.same[0].Key]
	}
	var b strings.Builder
	for _, r := range u.same {
		b.WriteString(sh.labels[r.Key])
		b.WriteByte(0)
	}
	return b.String()
}

func merge(sets ...map[string]string) map[string]string {
	all := map[string]string{}
	for _, set := range sets {
		maps.Copy(all, set)
	}
	return all
}
