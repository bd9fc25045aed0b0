package controlplane

import _ "embed"

const (
	// KWOKAnnotation on a Node, with KWOKAnnotationValue, gives the Node to kwok.
	KWOKAnnotation = "kwok.x-k8s.io/node"
	// KWOKAnnotationValue is what kwok looks for.
	KWOKAnnotationValue = "fake"

	// RunForAnnotation on a pod says how long it runs before it succeeds, as a Go duration. A pod without it runs until
	// it is deleted, also when a Job owns it.
	RunForAnnotation = "playground.drover.sh/run-for"
)

// stagesYAML is what kwok does to nodes and pods. The stages that kwok publishes would end a Job's pods at once; and a
// kwok that is given no stage for a kind leaves its objects alone.
//
//go:embed stages.yaml
var stagesYAML []byte
