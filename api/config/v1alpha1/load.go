package v1alpha1

import (
	"errors"
	"fmt"
	"os"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// GroupVersion is the apiVersion of every configuration file: config.drover.sh/v1alpha1.
var GroupVersion = schema.GroupVersion{Group: "config.drover.sh", Version: "v1alpha1"}

// Configuration is a configuration file's content.
//
// +kubebuilder:object:generate=false
type Configuration interface {
	runtime.Object
	// Default fills what the file leaves out.
	Default()
	// Validate returns one error per wrong field, each with the field's path and its value.
	Validate() field.ErrorList
	// Kind is the file's kind.
	Kind() string
}

// Load reads the YAML file at path into c, fills its defaults and validates it. An unknown field, a duplicate one, another
// apiVersion or kind, and a wrong value are errors that name the file, the field and the value.
func Load(path string, c Configuration) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading configuration: %w", err)
	}
	if err := Decode(data, c); err != nil {
		return fmt.Errorf("configuration file %s: %w", path, err)
	}
	return nil
}

// Decode is Load for content that is already in memory.
func Decode(data []byte, c Configuration) error {
	var meta metav1.TypeMeta
	if err := yaml.Unmarshal(data, &meta); err != nil {
		return fmt.Errorf("not YAML: %w", err)
	}
	if want := GroupVersion.String(); meta.APIVersion != want {
		return field.Invalid(field.NewPath("apiVersion"), meta.APIVersion, "must be "+want)
	}
	if want := c.Kind(); meta.Kind != want {
		return field.Invalid(field.NewPath("kind"), meta.Kind, "must be "+want)
	}
	if err := unmarshalStrict(data, c); err != nil {
		return err
	}
	c.Default()
	return c.Validate().ToAggregate()
}

// unmarshalStrict refuses unknown and doubled fields. Names are case-sensitive, as they are in the API server.
func unmarshalStrict(data []byte, c Configuration) error {
	converted, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return err
	}
	strict, err := json.UnmarshalStrict(converted, c)
	if err != nil {
		return err
	}
	return errors.Join(strict...)
}
