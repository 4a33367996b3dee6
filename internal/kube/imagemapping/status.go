package imagemapping

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cocoonstack.io/cocoon/internal/image"
)

// maxReported is the maximum number of problems in an object's status.
const maxReported = 50

// The condition of an object and its reasons.
const (
	conditionValid   = "Valid"
	reasonAllCount   = "AllRulesCount"
	reasonSomeBroken = "SomeRulesDoNotCount"
)

// report writes the problems of an object to its status, unless the status already has them.
//
// Every virtual node of a cluster does that, and nodes of different versions may find different problems. Each node writes a
// result only once, so that the nodes do not overwrite each other forever.
func (w *Watcher) report(ctx context.Context, object *unstructured.Unstructured, problems []image.MappingProblem) error {
	status := statusOf(object, problems)
	result := fmt.Sprint(object.GetUID(), object.GetGeneration(), problems)
	if w.reported[object.GetName()] == result {
		return nil
	}
	if old, _, _ := unstructured.NestedMap(object.Object, "status"); !equality.Semantic.DeepEqual(old, status) {
		changed := object.DeepCopy()
		changed.Object["status"] = status
		_, err := w.cfg.Client.Resource(Resource).Namespace(Namespace).UpdateStatus(ctx, changed, metav1.UpdateOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil // the object was deleted meanwhile
		case apierrors.IsConflict(err):
			w.cfg.Log.DebugContext(ctx, "image mapping changed while its status was written", "mapping", object.GetName())
			return nil // the change triggers a sync, which writes the status
		case err != nil:
			return fmt.Errorf("write the status of image mapping %s: %w", object.GetName(), err)
		}
	}
	w.reported[object.GetName()] = result
	return nil
}

// forget drops the results of deleted objects.
func (w *Watcher) forget(objects []*unstructured.Unstructured) {
	there := map[string]bool{}
	for _, o := range objects {
		there[o.GetName()] = true
	}
	for name := range w.reported {
		if !there[name] {
			delete(w.reported, name)
		}
	}
}

// statusOf returns the wanted status. It keeps the last transition time if the condition has not changed.
func statusOf(object *unstructured.Unstructured, problems []image.MappingProblem) map[string]any {
	valid, reason, message := "True", reasonAllCount, "all rules are valid"
	if n := len(problems); n > 0 {
		valid, reason, message = "False", reasonSomeBroken, problems[0].Message
		if problems[0].Rule != "" {
			message = problems[0].Rule + ": " + message
		}
		if n > 1 {
			message += fmt.Sprintf(" (and %d more, see status.problems)", n-1)
		}
	}
	since := time.Now().UTC().Format(time.RFC3339)
	conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
	for _, c := range conditions {
		if c, ok := c.(map[string]any); ok && c["type"] == conditionValid && c["status"] == valid {
			if t, ok := c["lastTransitionTime"].(string); ok {
				since = t
			}
		}
	}
	status := map[string]any{
		"observedGeneration": object.GetGeneration(),
		"conditions": []any{map[string]any{
			"type": conditionValid, "status": valid, "reason": reason, "message": message,
			"lastTransitionTime": since, "observedGeneration": object.GetGeneration(),
		}},
	}
	var list []any
	for i, p := range problems {
		if i == maxReported {
			list = append(list, map[string]any{"message": fmt.Sprintf("and %d more", len(problems)-i)})
			break
		}
		entry := map[string]any{"message": p.Message}
		if p.Rule != "" {
			entry["rule"] = p.Rule
		}
		list = append(list, entry)
	}
	if list != nil {
		status["problems"] = list
	}
	return status
}
