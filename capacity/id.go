package capacity

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"slices"
)

// ID returns 16 hex characters that are equal for equal needs, in every process and version of this package that has
// the same canonical form.
//
// Two things are left out because they are no part of what one pod needs of a node. Group.MinCount is the gang's and
// is not known from a pod, and a bare Same requirement repeats Group.TopologyKey on the wire. So a pod, the
// CapacityRequest written for it and the need that travels all have the same ID.
func (p Profile) ID() string {
	return p.Canonical().id()
}

// id is ID for a profile that is canonical already.
func (p Profile) id() string {
	e := encoder{buf: make([]byte, 0, 512)}
	var topology string
	if p.Group != nil {
		topology = p.Group.TopologyKey
	}
	e.requirements(slices.DeleteFunc(slices.Clone(p.Requirements), func(r Requirement) bool {
		return isSameOf(r, topology)
	}))
	e.count(len(p.Alternatives))
	for _, set := range p.Alternatives {
		e.requirements(set)
	}
	e.count(len(p.Resources))
	for _, name := range sortedKeys(p.Resources) {
		e.text(string(name))
		e.number(p.Resources[name])
	}
	e.number(int64(p.Priority))
	e.count(len(p.Spread))
	for _, s := range p.Spread {
		e.text(s.TopologyKey)
		e.text(string(s.WhenUnsatisfiable))
		e.number(int64(s.MaxSkew))
		e.number(int64(s.MinDomains))
	}
	e.count(len(p.Tolerations))
	for _, t := range p.Tolerations {
		e.text(t.Key)
		e.text(string(t.Operator))
		e.text(t.Value)
		e.text(string(t.Effect))
	}
	e.count(len(p.AntiAffinity))
	for _, a := range p.AntiAffinity {
		e.text(a.TopologyKey)
		e.text(a.Set)
	}
	if p.Group != nil {
		e.text(p.Group.Name)
		e.text(p.Group.TopologyKey)
	}
	return e.sum()
}

// isSameOf reports whether r says no more than that all nodes share one value of the key.
func isSameOf(r Requirement, key string) bool {
	return key != "" && r.Key == key && r.Operator == OperatorSame && len(r.Values) == 0
}

// encoder writes values so that different sequences of values give different bytes: texts carry their length.
type encoder struct{ buf []byte }

func (e *encoder) number(n int64) { e.buf = binary.AppendVarint(e.buf, n) }
func (e *encoder) count(n int)    { e.buf = binary.AppendVarint(e.buf, int64(n)) }

func (e *encoder) text(s string) {
	e.count(len(s))
	e.buf = append(e.buf, s...)
}

func (e *encoder) requirements(reqs []Requirement) {
	e.count(len(reqs))
	for _, r := range reqs {
		e.text(r.Key)
		e.text(string(r.Operator))
		e.count(len(r.Values))
		for _, v := range r.Values {
			e.text(v)
		}
	}
}

// sum returns 16 hex characters.
func (e *encoder) sum() string {
	h := sha256.Sum256(e.buf)
	return hex.EncodeToString(h[:8])
}
