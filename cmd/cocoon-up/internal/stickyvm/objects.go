package stickyvm

import (
	"context"
	"encoding/json"
	"fmt"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
	fwk "k8s.io/kube-scheduler/framework"
)

var (
	claims    = schema.GroupVersionResource{Group: "cocoonset.cocoonstack.io", Version: "v1", Resource: "vmplacements"}
	instances = schema.GroupVersionResource{Group: kubevirtGroup, Version: "v1", Resource: "virtualmachineinstances"}
	machines  = schema.GroupVersionResource{Group: kubevirtGroup, Version: "v1", Resource: "virtualmachines"}
)

// objects are the informers of custom resources.
type objects struct{ claims, instances, machines source }

// source is the informer of one kind of custom resource.
type source struct {
	resource schema.GroupVersionResource
	informer cache.SharedIndexInformer
}

// watch starts the informers, which run until ctx ends. It calls changed for
// each VM whose objects changed.
func watch(ctx context.Context, client dynamic.Interface, changed func(vm string)) (objects, error) {
	factory := dynamicinformer.NewDynamicSharedInformerFactory(client, 0)
	follow := func(r schema.GroupVersionResource, key func(namespace, name string) string) (source, error) {
		informer := factory.ForResource(r).Informer()
		if err := informer.SetTransform(slim); err != nil {
			return source{}, fmt.Errorf("watch %s: %w", r.Resource, err)
		}
		if err := informer.SetWatchErrorHandlerWithContext(quiet); err != nil {
			return source{}, fmt.Errorf("watch %s: %w", r.Resource, err)
		}
		tell := func(o any) {
			if name, err := cache.DeletionHandlingObjectToName(o); err == nil {
				changed(key(name.Namespace, name.Name))
			}
		}
		_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: tell, UpdateFunc: func(_, o any) { tell(o) }, DeleteFunc: tell})
		if err != nil {
			return source{}, fmt.Errorf("watch %s: %w", r.Resource, err)
		}
		return source{r, informer}, nil
	}
	var o objects
	var err error
	if o.claims, err = follow(claims, cocoonKey); err != nil {
		return o, err
	}
	if o.instances, err = follow(instances, kubevirtKey); err != nil {
		return o, err
	}
	// KubeVirt gives an instance the same name as its machine.
	if o.machines, err = follow(machines, kubevirtKey); err != nil {
		return o, err
	}
	factory.Start(ctx.Done())
	return o, nil
}

// slim keeps only the fields of an object that this package reads.
func slim(o any) (any, error) {
	u, ok := o.(*unstructured.Unstructured)
	if !ok {
		return o, nil
	}
	u.SetManagedFields(nil)
	delete(u.Object, "spec")
	if status, ok := u.Object["status"].(map[string]any); ok {
		for field := range status {
			if field != "nodeName" && field != "nodeUID" && field != "machineID" {
				delete(status, field)
			}
		}
	}
	return u, nil
}

// quiet ignores the error for an API that the cluster lacks.
func quiet(ctx context.Context, r *cache.Reflector, err error) {
	if !apierrors.IsNotFound(err) {
		cache.DefaultWatchErrorHandler(ctx, r, err)
	}
}

// get returns an object from the cache, or nil if the cache does not have it.
func (s source) get(namespace, name string) (*unstructured.Unstructured, *fwk.Status) {
	if !s.informer.HasSynced() {
		// An error, and not "unschedulable": the scheduler retries it by itself.
		return nil, fwk.AsStatus(fmt.Errorf("the objects of %s are not loaded yet; if the cluster does not have this custom resource, install it", s.resource.GroupResource()))
	}
	o, there, err := s.informer.GetIndexer().GetByKey(namespace + "/" + name)
	if err != nil {
		return nil, fwk.AsStatus(err)
	}
	if !there {
		return nil, nil
	}
	u, ok := o.(*unstructured.Unstructured)
	if !ok {
		return nil, fwk.AsStatus(fmt.Errorf("%s %s/%s is a %T", s.resource.Resource, namespace, name, o))
	}
	return u, nil
}

// record writes the node to the machine, if the machine has not changed since it was read.
func record(ctx context.Context, client dynamic.Interface, machine *unstructured.Unstructured, node *v1.Node) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": machine.GetUID(), "resourceVersion": machine.GetResourceVersion(),
		"annotations": map[string]string{nodeAnnotation: node.Name, claimAnnotation: string(machine.GetUID()) + "/" + string(node.UID)},
	}})
	if err != nil {
		return err
	}
	_, err = client.Resource(machines).Namespace(machine.GetNamespace()).Patch(ctx, machine.GetName(), types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "cocoon-scheduler"})
	return err
}
