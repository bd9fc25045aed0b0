package demand

import (
	"crypto/sha256"
	"encoding/base32"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

const (
	namePrefix = "cr-"
	// maxNameLength keeps a name usable as a label value, so that other tools can select by it.
	maxNameLength = 63
	// hashLength is 50 bits: with 100,000 pods whose shortened names are equal, two share a name once in 200,000 clusters.
	hashLength = 10
)

var hashEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// Name is the name of the CapacityRequest that stands for the pod: cr-<pod name, shortened>-<hash of the UID>. It depends on
// nothing else, which is what makes a duplicate impossible across processes and restarts. It is a valid DNS subdomain of at
// most 63 characters.
func Name(podName string, uid types.UID) string {
	room := maxNameLength - len(namePrefix) - 1 - hashLength
	if len(podName) > room {
		podName = podName[:room]
	}
	// A subdomain's labels end with a letter or a digit, and a cut may leave anything at the end.
	podName = strings.TrimRight(podName, ".-")
	return namePrefix + podName + "-" + shortHash(string(uid))
}

func shortHash(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return hashEncoding.EncodeToString(sum[:])[:hashLength]
}
