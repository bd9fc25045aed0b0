package capacity

import (
	"regexp"
	"strconv"
	"strings"
)

// said tells which plugin's word a text is, for those words that decide against a request and that nothing but the scheduler
// knows. What the pod, its claims and the templates tell is not listed: the classifier reads it there.
var said = []struct{ text, plugin string }{
	{"enough sibling pods", pluginCoscheduling},
	{"gated pods in the same PodGroup", pluginCoscheduling},
	{"waiting for minCount pods", pluginGangScheduling},
	{"waiting for pods's pod group", pluginGangScheduling},
	{"didn't match Pod's required features", pluginNodeDeclaredFeatures},
	{"resourceclaim in use", pluginDynamicResources},
	{"resourceclaim not available on the node", pluginDynamicResources},
	{"in the process of being allocated", pluginDynamicResources},
	{"device class", pluginDynamicResources},
	{"node allocatable resource claim", pluginDynamicResources},
	{"node-allocatable", pluginDynamicResources},
	{"ElasticQuota", pluginCapacityScheduling},
}

var (
	noNode  = regexp.MustCompile(`^0/(\d+) nodes are available: `)
	counted = regexp.MustCompile(`^(\d+) (.+)$`)
)

// RejectionsOfMessage reads what the scheduler wrote into a pod's condition PodScheduled, for a caller that did not see the
// scheduling cycle. It is nil for a message in another form, as other schedulers may write. Plugins are not named in a message:
// a Rejection has one only where its words are one plugin's, and else speaks for a new node.
func RejectionsOfMessage(message string) []Rejection {
	head := noNode.FindStringSubmatch(message)
	if head == nil {
		return nil
	}
	nodes := count(head[1])
	// What PostFilter plugins have to say comes after the first full stop.
	text, _, _ := strings.Cut(strings.TrimSuffix(message[len(head[0]):], "."), ". ")
	if text == "" {
		return nil
	}
	var out []Rejection
	for part := range strings.SplitSeq(text, ", ") {
		m := counted.FindStringSubmatch(part)
		switch {
		case m != nil:
			out = append(out, rejectionBy(m[2], count(m[1])))
		case len(out) == 0: // a PreFilter plugin turned the pod down as a whole
			return []Rejection{rejectionBy(text, nodes)}
		default: // a comma within a reason
			last := &out[len(out)-1]
			*last = rejectionBy(last.Reason+", "+part, last.Nodes)
		}
	}
	return out
}

func rejectionBy(reason string, nodes int32) Rejection {
	r := Rejection{Reason: reason, Nodes: nodes}
	for _, s := range said {
		if strings.Contains(reason, s.text) {
			r.Plugin = s.plugin
			break
		}
	}
	return r
}

// NotYetRefusedByAll stands in what one of several active schedulers says of a pod, as long as another one may have a place for
// it. The last one to refuse the pod leaves it out.
const NotYetRefusedByAll = "not yet refused by all schedulers"

// NotYetRefusedKey stands in the state of a scheduling cycle whose pod may still be served by another one of several active
// schedulers, for the plugins that come after the one which knows: they may help the pod, and ask for no capacity.
const NotYetRefusedKey = "drover.sh/NotYetRefusedByAll"

// RefusedByAll reports whether a message of the condition PodScheduled is the last word of the schedulers that share the pods:
// always, where there is one.
func RefusedByAll(message string) bool { return !strings.Contains(message, NotYetRefusedByAll) }

// count reads digits; more than an int32 holds is as good as the most.
func count(digits string) int32 {
	n, err := strconv.ParseInt(digits, 10, 32)
	if err != nil {
		return 1<<31 - 1
	}
	return int32(n)
}
