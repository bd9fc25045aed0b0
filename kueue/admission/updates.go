package admission

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	"github.com/drover-sh/drover/capacity"
)

// annotationPromise begins the annotation by which the pods of a workload carry what was promised; the rest of the name
// tells checks apart. By it a new leader rebuilds its ledger, pods are counted as they find their nodes, and a person sees
// where they were expected to go.
const annotationPromise = "fleet.lucy.sh/promise-"

// maxTolerations is how many the API of Kueue takes in one update.
const maxTolerations = 8

// updates gives every pod set the labels and tolerations that all nodes promised to it share, beyond what the pods and their
// flavors have. Kueue wants them additive: a key that is there already is left alone. Pods some of which have room on nodes
// that exist get no label, as those nodes need not have it.
func updates(w *Workload, used map[string][]*Hint, onNodes map[string]int32) []kueue.PodSetUpdate {
	var out []kueue.PodSetUpdate
	for i := range w.PodSets {
		set := &w.PodSets[i]
		hints := used[set.Name]
		if len(hints) == 0 && onNodes[set.Name] == 0 {
			continue
		}
		u := kueue.PodSetUpdate{Name: kueue.PodSetReference(set.Name)}
		for _, h := range hints {
			u.Tolerations = append(u.Tolerations, tolerationsFor(h.Template.Taints, slices.Concat(set.Profile.Tolerations, u.Tolerations))...)
		}
		if onNodes[set.Name] > 0 {
			for _, t := range set.Lent {
				if !slices.Contains(u.Tolerations, t) {
					u.Tolerations = append(u.Tolerations, t)
				}
			}
		} else if labels := shared(hints, set.Pinned); len(labels) > 0 {
			u.NodeSelector = labels
		}
		// What was promised comes first. The rest of the nodes is out of the pods' reach then, which is better than an update that the API server refuses.
		u.Tolerations = u.Tolerations[:min(len(u.Tolerations), maxTolerations)]
		if len(u.NodeSelector) > 0 || len(u.Tolerations) > 0 {
			out = append(out, u)
		}
	}
	return out
}

// shared are the labels that the nodes of all the hints have, without those that are selected already.
func shared(hints []*Hint, pinned map[string]string) map[string]string {
	labels := maps.Clone(hints[0].Labels)
	for _, h := range hints[1:] {
		maps.DeleteFunc(labels, func(k, v string) bool { return h.Labels[k] != v })
	}
	maps.DeleteFunc(labels, func(k, _ string) bool { _, there := pinned[k]; return there || k == corev1.LabelHostname })
	return labels
}

// lent are the tolerations that pods of a flavor which chose its nodes by labels get for the taints of those nodes.
func lent(set *PodSet, hints []Hint) []corev1.Toleration {
	if !set.Selected {
		return nil
	}
	var out []corev1.Toleration
	for i := range hints {
		if meets(&hints[i].Template, &set.Profile) {
			out = append(out, tolerationsFor(hints[i].Template.Taints, slices.Concat(set.Profile.Tolerations, out))...)
		}
	}
	return out
}

// tolerationsFor lets pods onto nodes with these taints, where they cannot go yet.
func tolerationsFor(taints []corev1.Taint, have []corev1.Toleration) []corev1.Toleration {
	var out []corev1.Toleration
	for _, t := range taints {
		if capacity.Tolerates(have, []corev1.Taint{t}) {
			continue
		}
		toleration := corev1.Toleration{Key: t.Key, Operator: corev1.TolerationOpEqual, Value: t.Value, Effect: t.Effect}
		if t.Value == "" {
			toleration.Operator = corev1.TolerationOpExists
		}
		out = append(out, toleration)
	}
	return out
}

// promiseAnnotation is the annotation of a check. A check's name can be longer than an annotation's may be.
func promiseAnnotation(check string) string {
	if len(check) <= 55 {
		return annotationPromise + check
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(check))
	return fmt.Sprintf("%s%s-%016x", annotationPromise, check[:38], h.Sum64())
}

// mark is what the annotation says: whose pod it is, since when the workload had its quota (a pod may be older: Kueue gates
// pods that nobody controls), of which set, and on the workload's first set which nodes were promised.
type mark struct {
	Workload types.UID        `json:"workload"`
	Reserved int64            `json:"reserved,omitempty"` // seconds since 1970
	PodSet   string           `json:"podSet"`
	Nodes    map[string]int32 `json:"nodes,omitempty"`
}

// writePromise marks the pods of all sets that the check decided about.
func writePromise(us []kueue.PodSetUpdate, check string, w *Workload, nodes map[string]int32) []kueue.PodSetUpdate {
	name := promiseAnnotation(check)
	for i, set := range w.concerned() {
		m := mark{Workload: w.UID, Reserved: w.Reserved.Unix(), PodSet: set.Name}
		if i == 0 {
			m.Nodes = nodes
		}
		text, err := json.Marshal(m)
		if _, there := set.Annotated[name]; there || err != nil {
			continue // texts and numbers always have a JSON form
		}
		j := slices.IndexFunc(us, func(u kueue.PodSetUpdate) bool { return string(u.Name) == set.Name })
		if j < 0 {
			us = append(us, kueue.PodSetUpdate{Name: kueue.PodSetReference(set.Name)})
			j = len(us) - 1
		}
		if us[j].Annotations == nil {
			us[j].Annotations = map[string]string{}
		}
		us[j].Annotations[name] = string(text)
	}
	return us
}

// readPromise is the inverse of writePromise; made is false where there is no mark of the check.
func readPromise(us []kueue.PodSetUpdate, check string) (nodes map[string]int32, made bool) {
	for _, u := range us {
		m, ok := readMark(u.Annotations[promiseAnnotation(check)])
		made = made || ok
		for name, n := range m.Nodes {
			if n <= 0 {
				continue
			}
			if nodes == nil {
				nodes = map[string]int32{}
			}
			nodes[name] += n
		}
	}
	return nodes, made
}

func readMark(text string) (mark, bool) {
	var m mark
	if text == "" || json.Unmarshal([]byte(text), &m) != nil {
		return mark{}, false
	}
	return m, true
}
