package admission

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	"github.com/drover-sh/drover/capacity"
)

// annotationPromise begins the annotation by which the pods of a workload carry what was promised; the rest of the name tells
// checks apart. It lets a new leader rebuild its ledger, and a person see where the pods were expected to go.
const annotationPromise = "fleet.lucy.sh/promise-"

// updates gives every pod set the labels and tolerations that all nodes promised to it share, beyond what the pods and their
// flavors have. Kueue wants them additive: a key that is there already is left alone.
func updates(w *Workload, used map[string][]*Hint) []kueue.PodSetUpdate {
	var out []kueue.PodSetUpdate
	for i := range w.PodSets {
		set := &w.PodSets[i]
		hints := used[set.Name]
		if len(hints) == 0 {
			continue
		}
		u := kueue.PodSetUpdate{Name: kueue.PodSetReference(set.Name)}
		labels := maps.Clone(hints[0].Labels)
		for _, h := range hints[1:] {
			maps.DeleteFunc(labels, func(k, v string) bool { return h.Labels[k] != v })
		}
		maps.DeleteFunc(labels, func(k, _ string) bool { _, pinned := set.Pinned[k]; return pinned || k == corev1.LabelHostname })
		if len(labels) > 0 {
			u.NodeSelector = labels
		}
		for _, h := range hints {
			u.Tolerations = append(u.Tolerations, tolerationsFor(h.Template.Taints, append(slices.Clone(set.Profile.Tolerations), u.Tolerations...))...)
		}
		if len(u.NodeSelector) > 0 || len(u.Tolerations) > 0 {
			out = append(out, u)
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

// writePromise puts the promise on the first pod set's update.
func writePromise(us []kueue.PodSetUpdate, check, podSet string, nodes map[string]int32) []kueue.PodSetUpdate {
	if len(nodes) == 0 {
		return us
	}
	text, err := json.Marshal(nodes)
	if err != nil {
		return us // a map of names to numbers always has a JSON form
	}
	return annotate(us, check, podSet, string(text))
}

func annotate(us []kueue.PodSetUpdate, check, podSet, text string) []kueue.PodSetUpdate {
	i := slices.IndexFunc(us, func(u kueue.PodSetUpdate) bool { return string(u.Name) == podSet })
	if i < 0 {
		us = append(us, kueue.PodSetUpdate{Name: kueue.PodSetReference(podSet)})
		i = len(us) - 1
	}
	if us[i].Annotations == nil {
		us[i].Annotations = map[string]string{}
	}
	us[i].Annotations[promiseAnnotation(check)] = text
	return us
}

// readPromise is the inverse of writePromise; nil where there is none.
func readPromise(us []kueue.PodSetUpdate, check string) map[string]int32 {
	for _, u := range us {
		text, ok := u.Annotations[promiseAnnotation(check)]
		if !ok {
			continue
		}
		var nodes map[string]int32
		if json.Unmarshal([]byte(text), &nodes) != nil {
			return nil
		}
		maps.DeleteFunc(nodes, func(_ string, n int32) bool { return n <= 0 })
		return nodes
	}
	return nil
}
